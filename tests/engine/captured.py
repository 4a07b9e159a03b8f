"""What an engine is told between the capture of a step and its replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any, Callable[[], None], str], None]
"""Changes a training with a ``model`` and a ``sync``, by its eager step, on a device."""


def load_state(training: Any, step: Callable[[], None], device: str) -> None:
    training.sync.load_state_dict(training.sync.state_dict())


def set_compression(training: Any, step: Callable[[], None], device: str) -> None:
    training.sync.compression = "bf16"
    step()


def set_weight(training: Any, step: Callable[[], None], device: str) -> None:
    training.sync.set_weight(2.0)
    step()


def piggyback(training: Any, step: Callable[[], None], device: str) -> None:
    training.sync.piggyback("loss", torch.ones(3, device=device))
    step()


def freeze(training: Any, step: Callable[[], None], device: str) -> None:
    next(training.model.parameters()).requires_grad_(False)
    step()


def detach(training: Any, step: Callable[[], None], device: str) -> None:
    training.sync.detach()
    del training.sync


CHANGES: list[Change] = [load_state, set_compression, set_weight, piggyback, freeze, detach]
