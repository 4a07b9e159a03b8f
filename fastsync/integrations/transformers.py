"""A callback that averages the gradients of Hugging Face's Trainer by the engine. It needs transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from .._handle import GradientHandle
from ..compression import AnyCompression
from .accelerate import register_prepared


class FastsyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Calls ``register_prepared`` once Trainer has wrapped its model.

    Use it as ``trainer.add_callback(FastsyncCallback(trainer))``. ``handle`` is None before training begins.

    Args:
        trainer: the Trainer that this is a callback of.
        compression: as in ``register_comm_hook``.
    """

    def __init__(self, trainer: Trainer, compression: AnyCompression = "none") -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(f"trainer: expected the Trainer that this is added to, got {trainer!r}")
        self.handle: GradientHandle | None = None
        self._trainer = trainer
        self._compression = compression
        self._model: nn.Module | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        model = self._trainer.model_wrapped
        if model is not self._model:  # a training that is continued keeps its model
            self._model = model
            self.handle = register_prepared(model, self._compression)
