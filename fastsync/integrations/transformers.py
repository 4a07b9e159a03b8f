"""A callback that averages the gradients of Hugging Face's Trainer by the engine. It needs transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from ..sync.compression import AnyCompression
from ..sync.handle import Handle
from .accelerate import register_prepared


class FastsyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Calls ``register_prepared`` once Trainer has wrapped its model.

    Use it as ``trainer.add_callback(FastsyncCallback(trainer))``. ``handle`` is None before training begins. Each rank
    adds the handle's state, with its residuals, to Trainer's checkpoints: ``fastsync_0.pt`` and so on. There is none
    where nothing is kept between steps, as with ``compression="none"``. A training that is resumed from a folder
    ``checkpoint-...`` in its ``output_dir`` loads it, if each rank has its own. Else, such as on more ranks than
    before, none does, and each rank warns.

    Args:
        trainer: the Trainer that this is a callback of.
        compression: as in ``register_comm_hook``.
    """

    def __init__(self, trainer: Trainer, compression: AnyCompression = "none") -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(f"trainer: expected the Trainer that this is added to, got {trainer!r}")
        self.handle: Handle | None = None
        self._trainer = trainer
        self._compression = compression
        self._model: nn.Module | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        model = self._trainer.model_wrapped
        if model is not self._model:  # a training that is continued keeps its model
            self._model = model
            self.handle = register_prepared(model, self._compression)
        if state.global_step > 0 and self.handle is not None:
            self._load(self.handle, _file(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.handle is None or args.save_only_model or state.is_hyper_param_search:  # each trial has its own folders
            return
        saved = self.handle.state_dict()
        # Every rank finds the same here. Residuals may be zeros, and so left out, on some ranks only.
        if self.handle._feeds_back() or saved["scales"] or saved.get("factors"):
            file = _file(args, state)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(saved, file)

    def _load(self, handle: Handle, file: Path) -> None:
        # The step of the state is equal on all ranks. So either all load one, or none does.
        without = _ranks_without(file)
        if not without:
            handle.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif handle._feeds_back() or len(without) < _world_size():
            warnings.warn(
                f"fastsync: ranks {without} have no state in {file.parent}, so the training is resumed without the "
                "residuals of error feedback, and without scales. Resume on no more ranks than it had; or put the "
                "checkpoint into output_dir, or call callback.handle.load_state_dict() before the first step",
                stacklevel=2,
            )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _ranks_without(file: Path) -> list[int]:
    """Returns the ranks whose own file is not there. Every rank must call it."""
    are_there = [file.exists()] * _world_size()
    if len(are_there) > 1:
        dist.all_gather_object(are_there, file.exists())
    return [rank for rank, is_there in enumerate(are_there) if not is_there]


def _file(args: TrainingArguments, state: TrainerState) -> Path:
    """Returns where this rank's state lies in the checkpoint of this step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"fastsync_{rank}.pt"
