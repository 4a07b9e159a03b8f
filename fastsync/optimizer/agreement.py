"""What ranks tell each other before a step, so that all take the same one or none does."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Number

import torch

from .. import _C

STEP = "the step of the optimizer"
"""What ranks wait for, for errors."""
TAKES_STEP, REFUSES, HAS_FAILED = 0.0, 1.0, 2.0
"""What a rank tells of itself before a step. HAS_FAILED: an earlier step has ended in an error on it."""
COMPARED = (
    "settings in param_groups",
    "parameters that have gradients",
    "state, as after a load_state_dict() on some",
    "clips of the gradients, or scales of a GradScaler",
    "finds of a GradScaler, whose inf or nan is in a gradient that no rank has averaged",
)
"""What has to be equal on all ranks, as an error calls it."""


def agree_on_step(
    engine: _C.Synchronizer,
    ranks: Sequence[int],
    own: Sequence[object],
    has_failed: bool,
    refusal: RuntimeError | None,
) -> None:
    """Waits until all ranks are about to step.

    Args:
        engine: of the handle.
        ranks: those that step together, as errors number them.
        own: what has to be equal on all ranks, by its repr: one for each of COMPARED. Empty with a refusal.
        has_failed: whether an earlier step has failed on this rank.
        refusal: why this rank does not step; None if it does.

    Raises:
        RuntimeError: ``refusal``, if this rank has one. Or another rank refuses the step, or has failed in an earlier
            one, or ranks would step in different ways.
    """
    state = HAS_FAILED if has_failed else TAKES_STEP if refusal is None else REFUSES
    texts = [repr(each) for each in own] if refusal is None else [""] * len(COMPARED)
    numbers = [float(zlib.crc32(text.encode())) for text in texts]
    try:
        told = engine.compare([state, *numbers], STEP)
    except RuntimeError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is not None:
        raise refusal
    for rank, (theirs, *_) in zip(ranks, told, strict=True):
        if theirs == HAS_FAILED:
            raise RuntimeError(
                f"fastsync: an earlier step of the optimizer has failed on rank {rank}, so its shard is behind the "
                "others. Load a checkpoint: call detach() of the handle before, and attach and shard again, on every "
                "rank"
            )
        if theirs == REFUSES:
            raise RuntimeError(
                f"fastsync: rank {rank} refuses this step, and its own error says why. With shard_optimizer "
                "the ranks step together, so no rank has stepped"
            )
    for number, what in enumerate(COMPARED, start=1):
        others = [rank for rank, theirs in zip(ranks, told, strict=True) if theirs[number] != told[0][number]]
        if others:
            raise RuntimeError(
                f"fastsync: the ranks were about to step with different {what}: "
                f"rank {others[0]} is not as rank {ranks[0]}. "
                "With shard_optimizer do the same to the optimizer on every rank"
            )


def comparable(value: object) -> object:
    """Returns what is equal on all ranks of a setting, for a repr.

    Of tensors on any device that is their numbers. A function counts by its name, and an object by its class.
    """
    if value is None or isinstance(value, (float, int, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return sorted(repr((comparable(key), comparable(each))) for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return [*map(comparable, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(comparable(each)) for each in value)
    if callable(to_list := getattr(value, "tolist", None)) and not isinstance(value, type):  # NumPy's have it, too
        return to_list()
    if isinstance(value, (Number, Enum, torch.dtype, torch.device)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
