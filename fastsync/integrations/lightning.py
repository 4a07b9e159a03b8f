"""A callback that averages the gradients of Lightning's Trainer by the engine. It needs lightning."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from ..sync.compression import AnyCompression
from ..sync.handle import Handle
from ..sync.synchronizer import GradientSynchronizer
from .accelerate import register_prepared


class FastsyncCallback(Callback):  # type: ignore[misc]  # without lightning it has no type
    """Calls ``register_prepared`` once the strategy has wrapped the model, on GPUs and on CPUs.

    Use it as ``Trainer(strategy="ddp", callbacks=[FastsyncCallback("int8+ef")])``, with any DDP strategy and without a
    ``ddp_comm_hook``. ``handle`` is None before ``fit`` begins. Lightning's checkpoints get the handle's state, with
    the residuals of all ranks, which rank 0 holds in memory while it saves.

    Args:
        compression: as in ``register_comm_hook``.
    """

    def __init__(self, compression: AnyCompression = "none") -> None:
        self.handle: Handle | None = None
        self._compression = compression
        self._loaded: Mapping[str, Any] | None = None
        self._module: weakref.ref[LightningModule] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before, goes_on = self.handle, self._module is not None and self._module() is pl_module
        state = before.state_dict() if before is not None and goes_on and self._loaded is None else self._loaded
        self._module = weakref.ref(pl_module)
        if isinstance(before, GradientSynchronizer):  # the model of a single rank is attached since the fit before
            before.detach()
        self.handle = register_prepared(trainer.strategy.model, self._compression)
        if state is not None:
            self.handle.load_state_dict(dict(state))
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the handle's state. With error feedback every rank must call it, as when Lightning saves."""
        if self.handle is None:
            return {}
        state = self.handle.state_dict()
        if dist.is_initialized() and self.handle._feeds_back():
            own = {name: residual.cpu() for name, residual in state["residuals"].items()}
            of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(own, of_ranks)
            state["residuals"] = {name: residual for each in of_ranks or [own] for name, residual in each.items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None
