"""What travels on the wire."""

from dataclasses import dataclass
from typing import Literal, get_args

Wire = Literal["none", "bf16", "fp16"]


@dataclass(frozen=True)
class Compression:
    """How gradients travel between the ranks.

    Wherever fastsync takes a ``compression``, the wire's name alone, such as ``"fp16"``, is shorthand for
    ``Compression(wire="fp16")``.
    """

    wire: Wire = "none"
    """``"none"``: the gradients' own dtype. ``"bf16"``: bfloat16, as wide in range as float32, 8 significant bits.
    ``"fp16"``: float16 behind a power-of-two scale per bucket that keeps finite values finite, 11 significant bits."""

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            expected = ", ".join(repr(wire) for wire in get_args(Wire))
            raise ValueError(f"compression: expected one of {expected} or a Compression of it, got {self.wire!r}")


def as_compression(compression: Compression | str) -> Compression:
    """``compression`` itself, or what the shorthand stands for. Raises ValueError for a name that is none."""
    if isinstance(compression, Compression):
        return compression
    return Compression(wire=compression)  # type: ignore[arg-type]  # checked by the constructor
