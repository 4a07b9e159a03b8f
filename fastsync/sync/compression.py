"""Compression: the form in which gradients are sent, who adds them, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from torch.optim import Optimizer

from ..messages import did_you_mean

Wire = Literal["none", "bf16", "fp16", "int8", "int4", "lowrank"]
Reduce = Literal["wire", "fp32"]
Algorithm = Literal["one_shot", "two_shot"]

BLOCKS: tuple[Wire, ...] = ("int8", "int4")
"""Wires that send blocks of whole numbers, each with a scale."""
LOW_RANK: Wire = "lowrank"
"""The wire that sends factors of matrices."""
DEFAULT_RANK = 4
FOR_DILOCO = "; fastsync.TopK() is an object, and for DiLoCo alone"
LOSSIER: tuple[Wire, ...] = ("int8",)
"""Wires that ``Auto`` chooses only if they are allowed."""


@dataclass(frozen=True)
class Compression:
    """Says in which form gradients travel between the ranks, and who adds them up.

    Wherever fastsync takes a ``compression``, a word may stand for it: ``"fp16"`` for ``Compression("fp16")``, and
    ``"int8+ef"`` for ``Compression("int8", error_feedback=True)``. See ``AnyCompression``.

    Raises:
        ValueError: a value is not one of those listed, or does not go with another one.
    """

    wire: Wire = "none"
    """``"none"``: the gradients' own dtype, which is the parameter's or its ``grad_dtype``.
    ``"bf16"``: bfloat16, as wide in range as float32, 8 significant bits.
    ``"fp16"``: float16 behind a power-of-two scale per bucket that keeps finite values finite, 11 significant bits.
    ``"int8"``: whole numbers from -127 to 127, blocks of 128 of them behind a float32 scale each.
    ``"int4"``: whole numbers from -7 to 7, in such blocks, too. Models learn as well only with error feedback.
    ``"lowrank"``: each matrix as the product of two thin factors in float32, with error feedback (PowerSGD). Vectors
    travel as they are. It needs whole matrices, so it does not go with ``fully_shard`` or ``shard_optimizer``."""
    reduce: Reduce | None = None
    """``"wire"``: the process group's all-reduce adds, in the wire's dtype. ``"fp32"``: ranks send each other what they
    have and add in float32, so that the error does not grow with their number. By default ``"fp32"`` for int8, int4,
    lowrank and two levels, else ``"wire"``. Ranks on CPUs that share memory add in float32 either way."""
    error_feedback: bool | None = None
    """Keep what was lost, and add it to the next step's gradients. By default true for lowrank, which has to, else
    false. Other wires need ``reduce="fp32"`` for it."""
    algorithm: Algorithm | None = None
    """With ``reduce="fp32"``. ``"one_shot"``: every rank sends all of its values to every other. ``"two_shot"``: every
    rank adds a part of the values, rounds the sums once more and sends them to all. By default one_shot between two
    ranks and for small buckets, else two_shot."""
    ranks_per_node: int = 1
    """The number of ranks of each node, which are consecutive. It must divide the number of all ranks. More than 1
    gives two levels: inside a node gradients are added at full width, and only between nodes they are compressed. A
    single node does not compress. Needs ``reduce="fp32"``, and takes no ``algorithm``. With 1 all links are alike."""
    rank: int | None = None
    """For lowrank alone: the number of columns of the factors, 4 by default. More lose less, and are more bytes. A
    matrix whose factors would have no fewer values travels as it is."""

    def __post_init__(self) -> None:
        if self.wire not in get_args(Wire):
            raise _wire_error(self.wire)
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            raise ValueError(f"compression: ranks_per_node has to be at least 1, got {self.ranks_per_node!r}")
        is_low_rank = self.wire == LOW_RANK
        if self.rank is None and is_low_rank:
            object.__setattr__(self, "rank", DEFAULT_RANK)
        if is_low_rank and (type(self.rank) is not int or self.rank < 1):
            raise ValueError(f"compression: rank has to be at least 1, got {self.rank!r}")
        if self.error_feedback is None:
            object.__setattr__(self, "error_feedback", is_low_rank)
        if self.reduce is None:
            adds_itself = self.wire in (*BLOCKS, LOW_RANK) or self.ranks_per_node > 1
            object.__setattr__(self, "reduce", "fp32" if adds_itself else "wire")
        options = {
            "reduce": get_args(Reduce),
            "algorithm": (None, *get_args(Algorithm)),
            "error_feedback": (True, False),
        }
        for name, known in options.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"compression: {name} has to be one of {', '.join(map(repr, known))}, got {value!r}")
        if why := self._conflict():
            raise ValueError(f"compression: {why}")

    def _conflict(self) -> str | None:
        """Returns which two values do not go together, and why; None if all do."""
        if self.wire == LOW_RANK:
            return self._conflict_of_low_rank()
        if self.rank is not None:
            return f"rank={self.rank!r} belongs to {LOW_RANK!r}; leave it out with {self.wire!r}"
        if self.error_feedback and self.wire == "none":
            return "error_feedback needs a wire that loses something, and 'none' does not"
        if self.ranks_per_node > 1 and self.algorithm is not None:
            return f"ranks_per_node={self.ranks_per_node} has an algorithm of its own; leave out {self.algorithm!r}"
        if self.reduce == "fp32":
            return None
        if self.wire in BLOCKS:
            return f"{self.wire} blocks cannot be added on the wire; leave reduce out or use 'fp32'"
        if self.error_feedback:
            return "error_feedback needs reduce='fp32': nobody keeps what an all-reduce loses"
        if self.algorithm is not None:
            return f"algorithm={self.algorithm!r} needs reduce='fp32'; with reduce='wire' the all-reduce has its own"
        if self.ranks_per_node > 1:
            return f"ranks_per_node={self.ranks_per_node} needs reduce='fp32': no all-reduce knows of nodes"
        return None

    def _conflict_of_low_rank(self) -> str | None:
        if not self.error_feedback:
            return "lowrank needs error_feedback, or what its factors leave out would be lost for good; leave it out"
        if self.ranks_per_node > 1:
            return f"lowrank sends factors between all ranks; leave out ranks_per_node={self.ranks_per_node}"
        if self.reduce == "wire" and self.algorithm is not None:
            return f"algorithm={self.algorithm!r} needs reduce='fp32'; with reduce='wire' the all-reduce has its own"
        return None

    def __str__(self) -> str:
        """Returns a few words, such as ``int8, error feedback, two_shot``."""
        words: list[str] = [self.wire if self.rank is None else f"{self.wire} of rank {self.rank}"]
        if self.error_feedback:
            words.append("error feedback")
        words.append("all_reduce" if self.reduce == "wire" else self.algorithm or "fp32 sums")
        if self.ranks_per_node > 1:
            words.append(f"{self.ranks_per_node} ranks per node")
        return ", ".join(words)


@dataclass(frozen=True)
class Auto:
    """A choice by measurement: for each bucket the least lossy ``Compression`` among the fastest on this process group.

    Full width and fp16 are candidates, added up by the process group's all-reduce, one_shot or two_shot, and bf16 with
    its all-reduce. ``"auto"`` stands for ``Auto()``. A lossier one has to gain more than the noise of measuring.

    On GPUs of several hosts no candidate adds within each host first. ``Compression(ranks_per_node=...)`` does.

    Raises:
        ValueError: ``allow`` is no tuple, or names a wire other than the lossier ones.
    """

    allow: tuple[str, ...] = ()
    """Lossier wires that are candidates too. There is ``"int8"``, which comes with error feedback."""

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple) or any(wire not in LOSSIER for wire in self.allow):
            raise ValueError(f"allow: expected a tuple of names out of {LOSSIER}, got {self.allow!r}")


AnyCompression: TypeAlias = Compression | Auto | str
"""The types of ``compression``: one of these objects, or a word for one. A word is a wire, such as ``"fp16"``, with
options behind plus signs, such as ``"int8+ef"``; or ``"auto"``; or ``"auto:int8"``, which allows int8. The options are
``ef`` (error feedback), ``fp32`` (ranks add in float32), ``one_shot`` and ``two_shot``. ``"lowrank:8"`` is lowrank of
rank 8. The command line has the same words."""


def as_compression(compression: object, argument: str = "compression") -> Compression | Auto:
    """Returns ``compression`` itself, or what the word stands for. Raises ValueError for anything else."""
    if isinstance(compression, Compression | Auto):
        return compression
    if isinstance(compression, str):
        return parse_compression(compression, argument)
    given, way_out = repr(compression), ""
    if isinstance(compression, Optimizer):
        given, way_out = f"the optimizer {type(compression).__name__}", "; pass it to fastsync.shard_optimizer"
    else:
        way_out = getattr(type(compression), "_way_out", "")  # TopK says where it belongs
    raise ValueError(
        f"{argument}: expected a word such as 'fp16' or 'int8+ef', a Compression or an Auto, got {given}{way_out}"
    )


_OPTIONS: dict[str, dict[str, Any]] = {
    "ef": {"reduce": "fp32", "error_feedback": True},
    "fp32": {"reduce": "fp32"},
    "one_shot": {"reduce": "fp32", "algorithm": "one_shot"},
    "two_shot": {"reduce": "fp32", "algorithm": "two_shot"},
}
_AUTOS = {"auto": Auto(), **{f"auto:{wire}": Auto(allow=(wire,)) for wire in LOSSIER}}


@lru_cache  # all_reduce_gradients asks at every step
def parse_compression(text: str, argument: str = "compression") -> Compression | Auto:
    """Reads a word, as ``AnyCompression`` describes them. Errors begin with the argument that it was given as.

    Raises:
        ValueError: it is no such word.
    """
    if text in _AUTOS:
        return _AUTOS[text]
    first, *options = text.split("+")
    wire, colon, rank = first.partition(":")
    wires = get_args(Wire)
    has_rank = wire == LOW_RANK and rank.isdecimal()
    if wire not in wires or (colon and not has_rank) or any(option not in _OPTIONS for option in options):
        names = [*wires, *_AUTOS]
        way_out = FOR_DILOCO if text.lower() == "topk" else ""
        # A text with a plus sign, or another sign in its place, is compared with words that have options.
        with_options = [f"{wire}+{option}" for wire in wires for option in _OPTIONS]
        known = names if text.isalnum() else [*names, f"{LOW_RANK}:{DEFAULT_RANK}", *with_options]
        raise ValueError(
            f"{argument}: expected one of {', '.join(names)}, lowrank:RANK, or a wire with options such as int8+ef "
            f"({', '.join(_OPTIONS)}), got {text!r}{way_out or did_you_mean(text, known)}"
        )
    if len(options) != len(set(options)) or {"one_shot", "two_shot"} <= set(options):
        raise ValueError(f"{argument}: {text!r} names an option twice, or two algorithms")
    values = {name: value for option in options for name, value in _OPTIONS[option].items()}
    if has_rank:
        values["rank"] = int(rank)
    return Compression(wire, **values)  # type: ignore[arg-type]  # it is one of them


def _wire_error(wire: object) -> ValueError:
    """Returns the error for a wire that is a word for another object. Raises ValueError if it is no word either."""
    meant = as_compression(wire)
    return ValueError(
        f"compression: {wire!r} is no wire, but a word for {_as_written(meant)}; write that, or pass the word itself "
        "in place of the Compression"
    )


def _as_written(compression: Compression | Auto) -> str:
    """Returns the call that makes the object, without default values."""
    if isinstance(compression, Auto):
        return f"Auto(allow={compression.allow!r})" if compression.allow else "Auto()"
    plain = Compression(compression.wire)
    changed = (
        field.name for field in fields(compression) if getattr(compression, field.name) != getattr(plain, field.name)
    )
    options = (f", {name}={getattr(compression, name)!r}" for name in changed)
    return f"Compression({compression.wire!r}{''.join(options)})"
