"""Compression: the form that gradients travel in between ranks, who adds them, and how it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ._checks import did_you_mean

if TYPE_CHECKING:
    from .autotune.profile import GroupProfile

Wire = Literal["none", "bf16", "fp16", "int8", "int4"]
Reduce = Literal["wire", "fp32"]
Algorithm = Literal["one_shot", "two_shot"]

BLOCKS: tuple[Wire, ...] = ("int8", "int4")
"""Wires of whole numbers, blocks of which share a scale."""
LOSSIER: tuple[Wire, ...] = ("int8",)
"""Wires that are chosen only where they are allowed."""

_EXPECTED = f"{', '.join(map(repr, (*get_args(Wire), 'auto')))}, a Compression or an Auto"


@dataclass(frozen=True)
class Compression:
    """Says in which form gradients travel between the ranks, and who adds them up.

    Wherever fastsync takes a ``compression``, the name of a wire stands for the Compression with that wire: ``"fp16"``
    for ``Compression("fp16")``.

    Raises:
        ValueError: a value is none of those there are, or does not go with another one.
    """

    wire: Wire = "none"
    """``"none"``: the gradients' own dtype. ``"bf16"``: bfloat16, as wide in range as float32, 8 significant bits.
    ``"fp16"``: float16 behind a power-of-two scale per bucket that keeps finite values finite, 11 significant bits.
    ``"int8"``: whole numbers from -127 to 127, blocks of 128 of them behind a float32 scale each.
    ``"int4"``: from -7 to 7, 128 behind a scale, too; it needs error feedback to learn as well."""
    reduce: Reduce | None = None
    """``"wire"``: the process group's all-reduce adds, in the wire's dtype. ``"fp32"``: ranks send each other what they
    have and add in float32, so that the error does not grow with their number. By default ``"fp32"`` for int8 and int4,
    which cannot be added on the wire, and for two levels; else ``"wire"``. Ranks on CPUs that share memory add in
    float32 either way."""
    error_feedback: bool = False
    """Keep what rounding lost, and add it to the next step's gradients. Needs ``reduce="fp32"``."""
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
            raise unknown(self.wire)
        if self.ranks_per_node is not None and not (is_int(self.ranks_per_node) and self.ranks_per_node >= 1):
            raise ValueError(f"compression: ranks_per_node has to be None or at least 1, got {self.ranks_per_node!r}")
        if self.reduce is None:
            object.__setattr__(self, "reduce", "fp32" if self.wire in BLOCKS or self._has_two_levels() else "wire")
        for name, options in (("reduce", get_args(Reduce)), ("algorithm", (None, *get_args(Algorithm)))):
            if (value := getattr(self, name)) not in options:
                expected = ", ".join(repr(option) for option in options)
                raise ValueError(f"compression: {name} has to be one of {expected}, got {value!r}")
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"compression: error_feedback has to be True or False, got {self.error_feedback!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.wire in BLOCKS and self.reduce == "wire":
            raise ValueError(
                f"compression: {self.wire} blocks cannot be added on the wire; leave reduce out or use 'fp32'"
            )
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

    def _has_two_levels(self) -> bool:
        return self.ranks_per_node is not None and self.ranks_per_node > 1

    def __str__(self) -> str:
        """In a few words, such as ``int8, error feedback, two_shot``."""
        words: list[str] = [self.wire]
        if self.error_feedback:
            words.append("error feedback")
        words.append("all_reduce" if self.reduce == "wire" else self.algorithm or "fp32 sums")
        if self.ranks_per_node is not None:
            words.append(f"{self.ranks_per_node} ranks per node")
        return ", ".join(words)


@dataclass(frozen=True)
class Auto:
    """A choice by measurement: for each bucket the least lossy ``Compression`` among the fastest on this process group.

    Full width and fp16 are candidates, added up by the process group's all-reduce, one_shot or two_shot, and bf16 with
    its all-reduce. ``"auto"`` stands for ``Auto()``.

    Raises:
        ValueError: ``allow`` names a wire that does not have to be allowed, or is none.
    """

    allow: tuple[str, ...] = ()
    """Lossier wires that are candidates too. There is ``"int8"``, which comes with error feedback."""
    profile: GroupProfile | None = None
    """What ``measure_group`` found, also as ``GroupProfile.load`` gives it. By default the group is measured."""

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple) or any(wire not in LOSSIER for wire in self.allow):
            raise ValueError(f"allow: expected a tuple of names out of {LOSSIER}, got {self.allow!r}")


AnyCompression: TypeAlias = Compression | Auto | str
"""What can be passed as ``compression``: the name of a wire, ``"auto"``, or one of these objects."""


def as_compression(compression: AnyCompression) -> Compression | Auto:
    """Returns ``compression`` itself, or what the name stands for. Raises ValueError for what is none."""
    if isinstance(compression, Compression | Auto):
        return compression
    if isinstance(compression, str):
        return _named(compression)
    raise unknown(compression)


@lru_cache  # all_reduce_gradients asks at every step
def _named(name: str) -> Compression | Auto:
    return Auto() if name == "auto" else Compression(name)  # type: ignore[arg-type]  # it refuses what is no wire


def on_nodes(compression: Compression | Auto, ranks_per_node: int | None) -> Compression | Auto:
    """Returns the same between nodes of so many ranks. None or 1 leaves it as it is.

    Raises:
        ValueError: it says something else about nodes, has an algorithm without nodes, or is an ``Auto``.
    """
    if ranks_per_node is None or ranks_per_node == 1:
        return compression
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


_OPTIONS: dict[str, dict[str, Any]] = {
    "ef": {"reduce": "fp32", "error_feedback": True},
    "fp32": {"reduce": "fp32"},
    "one_shot": {"reduce": "fp32", "algorithm": "one_shot"},
    "two_shot": {"reduce": "fp32", "algorithm": "two_shot"},
}


def parse_compression(text: str) -> Compression | Auto:
    """Reads a command line's word: a wire with options behind plus signs, such as ``int8+ef``, ``auto``, ``auto:int8``.

    Raises:
        ValueError: it stands for none.
    """
    if text in ("auto", *(f"auto:{wire}" for wire in LOSSIER)):
        return Auto(allow=tuple(text.split(":")[1:]))
    wire, *options = text.split("+")
    if wire not in get_args(Wire) or any(option not in _OPTIONS for option in options):
        names = (*get_args(Wire), "auto", *(f"auto:{wire}" for wire in LOSSIER))
        raise ValueError(
            f"compression: expected one of {', '.join(names)}, or a wire with options such as int8+ef "
            f"({', '.join(_OPTIONS)}), got {text!r}{did_you_mean(text, names)}"
        )
    values: dict[str, Any] = {}
    for name, value in (item for option in options for item in _OPTIONS[option].items()):
        if values.setdefault(name, value) != value:
            raise ValueError(f"compression: {text!r} says both {name}={values[name]!r} and {value!r}")
    return Compression(wire, **values)  # type: ignore[arg-type]  # it is one of them


def unknown(compression: object) -> ValueError:
    """Makes the error for what is no compression."""
    meant = did_you_mean(compression, (*get_args(Wire), "auto")) if isinstance(compression, str) else ""
    return ValueError(f"compression: expected one of {_EXPECTED}, got {compression!r}{meant}")


def is_int(value: Any) -> bool:
    """Tells whether it is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
