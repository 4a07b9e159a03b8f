"""What travels on the wire: one choice, a choice to be made by measurement, or one for each part of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from .group_profile import GroupProfile

Wire = Literal["none", "bf16", "fp16", "int8"]
Reduce = Literal["wire", "fp32"]
Rounding = Literal["nearest", "stochastic"]
Algorithm = Literal["one_shot", "two_shot"]


@dataclass(frozen=True)
class Compression:
    """How gradients travel between the ranks, and who adds them up.

    Wherever fastsync takes a ``compression``, the wire's name alone, such as ``"fp16"``, is shorthand for
    ``Compression(wire="fp16")``.

    Raises:
        ValueError: a value is none of those there are, or does not go with another one.
    """

    wire: Wire = "none"
    """``"none"``: the gradients' own dtype. ``"bf16"``: bfloat16, as wide in range as float32, 8 significant bits.
    ``"fp16"``: float16 behind a power-of-two scale per bucket that keeps finite values finite, 11 significant bits.
    ``"int8"``: whole numbers from -127 to 127, blocks of 128 of them behind a float32 scale each."""
    reduce: Reduce | None = None
    """``"wire"``: the process group's all-reduce adds, in the wire's dtype. ``"fp32"``: ranks send each other what they
    have and add in float32, so that the error does not grow with their number. By default ``"fp32"`` for int8, which
    cannot be added on the wire, and for two levels; else ``"wire"``. Ranks on CPUs that share memory add in float32
    either way."""
    error_feedback: bool = False
    """Keep what rounding lost, and add it to the next step's gradients. Needs ``reduce="fp32"``."""
    rounding: Rounding = "nearest"
    """Of int8: to the nearest, or up or down by chance such that the expectation is the value itself."""
    algorithm: Algorithm | None = None
    """With ``reduce="fp32"``. ``"one_shot"``: every rank sends all of its values to every other. ``"two_shot"``: every
    rank sends each other its part, which that one adds, rounds once more and sends to all. By default one_shot between
    two ranks and for small buckets, else two_shot."""
    ranks_per_node: int | None = None
    """Two levels: ranks of a node, which has that many with consecutive numbers, first add among themselves, at the
    gradients' own width; only between nodes do the gradients travel as said here, and the sums also inside the node
    that they came to. The number of ranks has to be a multiple of it; if it is the same, there is one node, and nothing
    is compressed. Needs ``reduce="fp32"``, and has an algorithm of its own. None or 1: all links are alike."""

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            raise ValueError(f"compression: expected one of {_EXPECTED}, got {self.wire!r}")
        if self.ranks_per_node is not None and not (_is_int(self.ranks_per_node) and self.ranks_per_node >= 1):
            raise ValueError(f"compression: ranks_per_node has to be None or at least 1, got {self.ranks_per_node!r}")
        if self.reduce is None:
            object.__setattr__(self, "reduce", "fp32" if self.wire == "int8" or self._has_two_levels() else "wire")
        for name, options in (
            ("reduce", get_args(Reduce)), ("rounding", get_args(Rounding)), ("algorithm", (None, *get_args(Algorithm))),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in options:
                expected = ", ".join(repr(option) for option in options)
                raise ValueError(f"compression: {name} has to be one of {expected}, got {value!r}")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"compression: error_feedback has to be True or False, got {self.error_feedback!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.wire == "int8" and self.reduce == "wire":
            raise ValueError("compression: int8 blocks cannot be added on the wire; leave reduce out or use 'fp32'")
        if self.error_feedback and self.wire == "none":
            raise ValueError("compression: error_feedback needs a wire that loses something, and 'none' does not")
        if self.error_feedback and self.reduce == "wire":
            raise ValueError("compression: error_feedback needs reduce='fp32': nobody keeps what an all-reduce loses")
        if self.algorithm is not None and self.reduce == "wire":
            raise ValueError(
                f"compression: algorithm={self.algorithm!r} needs reduce='fp32'; with reduce='wire' the process "
                "group's all-reduce has its own"
            )
        if self._has_two_levels() and self.reduce == "wire":
            raise ValueError(
                f"compression: ranks_per_node={self.ranks_per_node} needs reduce='fp32': no all-reduce knows of nodes"
            )
        if self._has_two_levels() and self.algorithm is not None:
            raise ValueError(
                f"compression: ranks_per_node={self.ranks_per_node} has an algorithm of its own; leave out "
                f"algorithm={self.algorithm!r}"
            )
        if self.rounding == "stochastic" and self.wire != "int8":
            raise ValueError(f"compression: rounding='stochastic' is for wire='int8', got wire={self.wire!r}")

    def _has_two_levels(self) -> bool:
        return self.ranks_per_node is not None and self.ranks_per_node > 1

    def __str__(self) -> str:
        """In a few words, such as ``int8, error feedback, two_shot``."""
        words: list[str] = [self.wire]
        if self.error_feedback:
            words.append("error feedback")
        if self.rounding == "stochastic":
            words.append("stochastic")
        words.append("all_reduce" if self.reduce == "wire" else self.algorithm or "fp32 sums")
        if self.ranks_per_node is not None:
            words.append(f"{self.ranks_per_node} ranks per node")
        return ", ".join(words)


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


LOSSIER: tuple[Wire, ...] = ("int8",)
"""Wires that are chosen only where they are allowed."""


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
        if not all(_is_int(step) for step in steps):
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
        """From a mapping of first steps to compressions or their shorthand. Raises ValueError for what is none."""
        chosen = {step: as_compression(compression) for step, compression in compressions.items()}
        return cls(tuple(chosen.items()))  # type: ignore[arg-type]  # checked by the constructor

    def at(self, step: int) -> Compression | Auto:
        """What counts in a step."""
        return next(compression for first, compression in reversed(self.phases) if first <= step)


AnyCompression: TypeAlias = Compression | Auto | Schedule | str | Mapping[int, Compression | Auto | str]
"""What can be passed as ``compression``."""

_SHORTHANDS = {"auto": Auto(), **{f"auto:{wire}": Auto(allow=(wire,)) for wire in LOSSIER}}
_EXPECTED = (
    ", ".join(repr(name) for name in (*get_args(Wire), *_SHORTHANDS))
    + ", a Compression, an Auto, or a mapping of first steps to these"
)


def as_compression(compression: AnyCompression) -> Compression | Auto | Schedule:
    """``compression`` itself, or what the shorthand stands for. Raises ValueError for what is none."""
    if isinstance(compression, Compression | Auto | Schedule):
        return compression
    if isinstance(compression, Mapping):
        return Schedule.of(compression)
    if isinstance(compression, str) and compression in _SHORTHANDS:
        return _SHORTHANDS[compression]
    return Compression(wire=compression)  # type: ignore[arg-type]  # checked by the constructor


def on_nodes(compression: Compression | Auto | Schedule, ranks_per_node: int | None) -> Compression | Auto | Schedule:
    """The same between nodes of so many ranks. None or 1 leaves it as it is.

    Raises:
        ValueError: it says something else about nodes, has an algorithm without nodes, or is an ``Auto``.
    """
    if ranks_per_node is None or ranks_per_node == 1:
        return compression
    if isinstance(compression, Schedule):
        return Schedule(tuple((step, _on_nodes(each, ranks_per_node)) for step, each in compression.phases))
    return _on_nodes(compression, ranks_per_node)


def _on_nodes(compression: Compression | Auto, ranks_per_node: int) -> Compression:
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
