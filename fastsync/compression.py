"""Compression: the form that gradients travel in between ranks, and who adds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastsync.wording import did_you_mean

Wire = Literal["none", "bf16", "fp16", "int8"]
Reduce = Literal["wire", "fp32"]
Rounding = Literal["nearest", "stochastic"]
Algorithm = Literal["one_shot", "two_shot"]

LOSSIER: tuple[Wire, ...] = ("int8",)
"""Wires that are chosen only where they are allowed."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "ef": {"reduce": "fp32", "error_feedback": True},
    "fp32": {"reduce": "fp32"},
    "one_shot": {"reduce": "fp32", "algorithm": "one_shot"},
    "two_shot": {"reduce": "fp32", "algorithm": "two_shot"},
    "stochastic": {"rounding": "stochastic"},
}
"""What stands behind a wire's name in a shorthand, and the fields that it sets."""

_NAMES = (*get_args(Wire), "auto", *(f"auto:{wire}" for wire in LOSSIER))

_EXPECTED = (
    ", ".join(map(repr, _NAMES))
    + f", a wire with options such as 'int8+ef' ({', '.join(_OPTIONS)}), a Compression, an Auto, or a mapping of first "
    "steps to these"
)


@dataclass(frozen=True)
class Compression:
    """Says in which form gradients travel between the ranks, and who adds them up.

    Wherever fastsync takes a ``compression``, a string is shorthand for one: the wire's name, and behind it what is
    not as by default, joined by plus signs: ``"fp16"`` for ``Compression("fp16")``, ``"int8+ef"`` for
    ``Compression("int8", error_feedback=True)``. Options are ``ef`` (error feedback), ``fp32``, ``one_shot`` and
    ``two_shot`` (who adds; ``ef`` and these set ``reduce="fp32"``), and ``stochastic``.

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
            raise unknown(self.wire)
        if self.ranks_per_node is not None and not (is_int(self.ranks_per_node) and self.ranks_per_node >= 1):
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

    @classmethod
    def of(cls, shorthand: str) -> Compression:
        """Makes what a string such as ``"int8+ef"`` stands for. Raises ValueError where it stands for none."""
        wire, *options = shorthand.split("+")
        if wire not in get_args(Wire) or any(option not in _OPTIONS for option in options):
            raise unknown(shorthand)
        values: dict[str, Any] = {}
        for name, value in (item for option in options for item in _OPTIONS[option].items()):
            if values.setdefault(name, value) != value:
                raise ValueError(f"compression: {shorthand!r} says both {name}={values[name]!r} and {value!r}")
        return cls(wire, **values)  # type: ignore[arg-type]  # it is one of them

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


def unknown(compression: object) -> ValueError:
    """Makes the error for what is no compression."""
    meant = did_you_mean(compression, _NAMES) if isinstance(compression, str) else ""
    return ValueError(f"compression: expected one of {_EXPECTED}, got {compression!r}{meant}")


def is_int(value: Any) -> bool:
    """Tells whether it is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
