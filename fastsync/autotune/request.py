"""Requests, as ``compression`` takes them: one, a choice by measurement, or one for each part of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from os import PathLike
from typing import TypeAlias

from fastsync.autotune.profile import GroupProfile
from fastsync.compression import LOSSIER, Compression, is_int, unknown


@dataclass(frozen=True)
class Auto:
    """A choice by measurement: for each bucket the least lossy ``Compression`` among the fastest on this process group.

    Full width and fp16 are candidates, added up by the process group's all-reduce, one_shot or two_shot, and bf16 with
    its all-reduce.
    ``"auto"`` is shorthand for ``Auto()``, ``"auto:int8"`` for ``Auto(allow=("int8",))``.

    Raises:
        ValueError: ``allow`` names a wire that does not have to be allowed, or is none.
    """

    allow: tuple[str, ...] = ()
    """Lossier wires that are candidates too. There is ``"int8"``, which comes with error feedback."""
    profile: GroupProfile | str | PathLike[str] | None = None
    """What ``measure_group`` found, or a file that it was saved to. By default the group is measured."""

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple) or any(wire not in LOSSIER for wire in self.allow):
            raise ValueError(f"allow: expected a tuple of names out of {LOSSIER}, got {self.allow!r}")


@dataclass(frozen=True)
class Schedule:
    """Another compression from some step on, such as full width first and 16 bits later.

    Wherever fastsync takes a ``compression``, a mapping such as ``{0: "none", 1000: "fp16"}`` is shorthand for it.
    Steps are synchronised backward passes, counted from 0; a resumed run goes on counting where its state was saved.

    Raises:
        ValueError: it does not begin at step 0, steps are no whole numbers or do not ascend, or a compression is none.
    """

    phases: tuple[tuple[int, Compression | Auto], ...]
    """(first step, compression), steps ascending from 0."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.phases]
        if not all(is_int(step) for step in steps):
            raise ValueError(f"compression: the steps of a schedule have to be whole numbers, got {steps}")
        if not steps or steps[0] != 0:
            raise ValueError(f"compression: a schedule has to say what begins at step 0, got steps {steps}")
        if any(step >= later for step, later in pairwise(steps)):
            raise ValueError(f"compression: the steps of a schedule have to ascend, got {steps}")
        for step, compression in self.phases:
            if not isinstance(compression, Compression | Auto):
                raise ValueError(
                    f"compression: expected a Compression or an Auto from step {step} on, got {compression!r}"
                )

    @classmethod
    def of(cls, compressions: Mapping[int, Compression | Auto | str]) -> Schedule:
        """Makes one from a mapping of first steps to compressions or shorthands. Raises ValueError for what is none."""
        chosen = {step: as_compression(compression) for step, compression in compressions.items()}
        return cls(tuple(chosen.items()))  # type: ignore[arg-type]  # checked by the constructor

    def at(self, step: int) -> Compression | Auto:
        """Returns what counts in a step."""
        return next(compression for first, compression in reversed(self.phases) if first <= step)


AnyCompression: TypeAlias = Compression | Auto | Schedule | str | Mapping[int, Compression | Auto | str]
"""What can be passed as ``compression``."""

_SHORTHANDS = {"auto": Auto(), **{f"auto:{wire}": Auto(allow=(wire,)) for wire in LOSSIER}}


def as_compression(compression: AnyCompression) -> Compression | Auto | Schedule:
    """Returns ``compression`` itself, or what the shorthand stands for. Raises ValueError for what is none."""
    if isinstance(compression, Compression | Auto | Schedule):
        return compression
    if isinstance(compression, Mapping):
        return Schedule.of(compression)
    if isinstance(compression, str):
        return _of_string(compression)
    raise unknown(compression)


@lru_cache  # all_reduce_gradients asks at every step
def _of_string(shorthand: str) -> Compression | Auto:
    return _SHORTHANDS.get(shorthand) or Compression.of(shorthand)


def on_nodes(compression: Compression | Auto | Schedule, ranks_per_node: int | None) -> Compression | Auto | Schedule:
    """Returns the same between nodes of so many ranks. None or 1 leaves it as it is.

    Raises:
        ValueError: it says something else about nodes, has an algorithm without nodes, or is an ``Auto``.
    """
    if ranks_per_node is None or ranks_per_node == 1:
        return compression
    if isinstance(compression, Schedule):
        phases = tuple((step, on_nodes(each, ranks_per_node)) for step, each in compression.phases)
        return Schedule(phases)  # type: ignore[arg-type]  # checked by the constructor
    if isinstance(compression, Auto):
        raise ValueError(
            f"compression: {compression} measures ranks whose links are alike, and the process group's DeviceMesh says "
            f"that nodes have {ranks_per_node} each; name a Compression"
        )
    if compression.ranks_per_node not in (None, ranks_per_node):
        raise ValueError(
            f"compression: ranks_per_node={compression.ranks_per_node}, but the process group's DeviceMesh has nodes "
            f"of {ranks_per_node} ranks; leave it out"
        )
    return replace(compression, reduce="fp32", ranks_per_node=ranks_per_node)
