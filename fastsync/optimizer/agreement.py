"""What ranks tell each other before a step, so that all take the same one or none does."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from math import isnan
from numbers import Number

import torch
from torch import Tensor

from .. import _C
from .checks import OR_ELSE

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
ON_DEVICE = (COMPARED[0], COMPARED[3], COMPARED[4])
"""What may lie on a device."""
GO_ON = "Load a checkpoint: call detach() of the handle before, and attach and shard again, on every rank"
_THE_SAME = "With shard_optimizer do the same to the optimizer on every rank"
_GOLDEN = 0.6180339887498949  # sums with such weights are unlikely to be equal by chance


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
    try:
        told = engine.compare([state, *_hashes(own)], STEP)
    except RuntimeError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is not None:
        raise refusal
    for rank, (theirs, *_) in zip(ranks, told, strict=True):
        if theirs == HAS_FAILED:
            raise failed_on(rank)
        if theirs == REFUSES:
            raise _refused_by(rank)
    if difference := _difference(ranks, told):
        raise RuntimeError(f"fastsync: the ranks were about to step with different {difference}. {_THE_SAME}")


class LateAgreement:
    """The same on a device, where the host does not wait: it hears of a step when it comes to the next one.

    So an error comes one step late, on all ranks. Their parameters are the same even then. In the first step the host
    waits, because a mistake in the script is likely to be there.
    """

    def __init__(self, engine: _C.Synchronizer, ranks: Sequence[int], names: Sequence[str]) -> None:
        """Takes the ranks that step together, and the names of the attached parameters."""
        self._engine, self._ranks, self._names = engine, ranks, names
        self.is_first = True
        """Whether the host waits for what other ranks tell, and for whatever else it has to know."""
        self._has_told = False  # of a step that it has not heard of

    def tell(
        self,
        own: Sequence[object],
        on_device: Sequence[Sequence[Tensor]],
        stepped: Sequence[int],
        has_failed: bool,
        is_refused: bool,
    ) -> bool:
        """Tells the other ranks of a step. They take it, and hear of this rank later; but not in the first step.

        Args:
            own: what has to be equal on all ranks, as in ``agree_on_step``.
            on_device: tensors on the device that have to be equal, too, for each of ON_DEVICE.
            stepped: the parameters whose gradients must not have been changed since backward.
            has_failed: whether something has gone wrong on this rank since an earlier step.
            is_refused: whether this rank does not step.

        Returns:
            Whether the others take the step in any case.

        Raises:
            RuntimeError: in the first step, what ``agree_on_step`` raises.
        """
        changes = self._engine.note_other_values(stepped)
        digests = [_digest(tensors, changes) for tensors in on_device]
        state = HAS_FAILED if has_failed else REFUSES if is_refused else TAKES_STEP
        self._engine.tell([state, *_hashes(own)], torch.cat([*digests, changes]), STEP)
        self._has_told = True
        if not self.is_first:
            return True
        told = self._told()
        if not is_refused:
            self._check(told, is_late=False)
            self.is_first = False
        return False

    def hear(self) -> None:
        """Raises RuntimeError if ranks have taken the newest step in different ways, or not all of them have."""
        if self._has_told:
            told = self._told()
            if any(theirs[0] != REFUSES for theirs in told):  # else no rank has stepped
                self._check(told, is_late=True)

    def _told(self) -> list[list[float]]:
        self._has_told = False
        return self._engine.hear()

    def _check(self, told: Sequence[Sequence[float]], is_late: bool) -> None:
        if changes := self._engine.noted_other_values():
            raise changed_since(self._names[changes[0]], GO_ON if is_late else "")
        for rank, (state, *_, num_changes) in zip(self._ranks, told, strict=True):
            if state == HAS_FAILED:
                raise failed_on(rank)
            if state == REFUSES or num_changes > 0:
                raise _left_behind(rank) if is_late else _refused_by(rank)
        if difference := _difference(self._ranks, told):
            what = "have taken the newest step" if is_late else "were about to step"
            way_out = f"{_THE_SAME}. {GO_ON}" if is_late else _THE_SAME
            raise RuntimeError(f"fastsync: the ranks {what} with different {difference}. {way_out}")


def failed_on(rank: int) -> RuntimeError:
    """Returns the error of all ranks after a step that has failed on one."""
    return RuntimeError(
        f"fastsync: an earlier step of the optimizer has failed on rank {rank}, so its shard is behind the others. "
        f"{GO_ON}"
    )


def changed_since(name: str, way_out: str = "") -> RuntimeError:
    """Returns the error of a rank whose gradient was changed between backward and step."""
    return RuntimeError(
        "fastsync: with shard_optimizer a step takes the means that backward() has made, and the gradient of "
        f"{name} was changed since, as torch.nn.utils.clip_grad_norm_ and GradScaler.unscale_ do. Call "
        f"fastsync.clip_grad_norm_(sync, ...) alone, and make the optimizer with fused=True for a GradScaler. {OR_ELSE}"
        + (f". {way_out}" if way_out else "")
    )


def _refused_by(rank: int) -> RuntimeError:
    return RuntimeError(
        f"fastsync: rank {rank} refuses this step, and its own error says why. With shard_optimizer the ranks step "
        "together, so no rank has stepped"
    )


def _left_behind(rank: int) -> RuntimeError:
    return RuntimeError(
        f"fastsync: rank {rank} has refused the newest step, or has changed gradients before it, and its own error "
        f"says why. Other ranks have taken the step, and on a GPU they hear of that now. {GO_ON}"
    )


def _difference(ranks: Sequence[int], told: Sequence[Sequence[float]]) -> str:
    """Tells what of COMPARED is not equal on all ranks, and on which rank; empty if all is."""
    for number, what in enumerate((*COMPARED, *ON_DEVICE), start=1):
        numbers = [theirs[number] for theirs in told if number < len(theirs)]
        for rank, theirs in zip(ranks, numbers, strict=False):
            if theirs != numbers[0] and not (isnan(theirs) and isnan(numbers[0])):
                return f"{what}: rank {rank} is not as rank {ranks[0]}"
    return ""


def _hashes(own: Sequence[object]) -> list[float]:
    texts = [repr(each) for each in own] or [""] * len(COMPARED)
    return [float(zlib.crc32(text.encode())) for text in texts]


def _digest(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns a number on the device that is equal where all of the tensors are: their sum, each with its weight."""
    digest = torch.zeros_like(like)
    for place, tensor in enumerate(tensors):
        digest += tensor.detach().to(like).sum() * (1.0 + place * _GOLDEN)
    return digest


def comparable(value: object, on_device: list[Tensor]) -> object:
    """Returns what is equal on all ranks of a setting, for a repr.

    Of tensors that is their numbers, but those on a device are added to the list, because the host would have to wait.
    A function counts by its name, and an object by its class.
    """
    if isinstance(value, Tensor) and not value.is_cpu:
        on_device.append(value)
        return "on a device"
    if value is None or isinstance(value, (float, int, str, bytes)):
        return value
    if isinstance(value, Mapping):
        by_key = {repr(comparable(key, on_device)): each for key, each in value.items()}
        return [(key, comparable(by_key[key], on_device)) for key in sorted(by_key)]
    if isinstance(value, (tuple, list)):
        return [comparable(each, on_device) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(comparable(each, on_device)) for each in value)
    if callable(to_list := getattr(value, "tolist", None)) and not isinstance(value, type):  # NumPy's have it, too
        return to_list()
    if isinstance(value, (Number, Enum, torch.dtype, torch.device)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
