"""Buckets to test the operators with: a list that has one of every kind, and a strategy for random ones.

A ``Bucket`` is a description; ``build`` makes its tensors, bit for bit the same each time, so that an operator and the
reference can be given equal inputs of their own to write into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests import reference

# On an emulated one the kernels of CUDA run on tensors of the CPU, threads and blocks in this order or in the opposite;
# on a generic one torch's own operations run in place of the kernels that were built.
DESCENDING = "emulated-descending"
ON_GPU = [pytest.param(device, marks=pytest.mark.gpu) for device in ("cuda", "cuda-generic")]
DEVICES = ["cpu", "cpu-generic", "emulated", DESCENDING, *ON_GPU]
on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)  # see conftest.py
# For tests of single values, in which nobody waits for anybody.
in_either_order = pytest.mark.parametrize("device", [each for each in DEVICES if each != DESCENDING], indirect=True)
OPERATORS = ["pack", "unpack", "reduce"]
GRAD_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# None: the gradients' own; uint8: blocks of int8; int8: those of int4.
WIRE_DTYPES = [None, torch.float16, torch.bfloat16, torch.uint8, torch.int8]
VALUES = ["ordinary", "mostly_ordinary", "wide", "tiny", "halves", "special", "bits", "zeros"]

# What lies in a storage behind the last element of its tensor: nobody may write there. There is room for a warp that
# goes on to the end of its block of int8, so that this shows in a comparison and not in a crash.
NUM_BEHIND = 128 + 3
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Gradient:
    """One gradient's shape, and how many elements after its storage's start it lies."""

    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Bucket:
    """Everything that the operators are given. ``scale_exponent=None`` stands for no bucket scale.

    ``pack`` writes the first of ``num_wires``, ``unpack`` and ``reduce`` add all of them up. ``sums`` says which sides
    of ``reduce`` are of the wire's dtype; "sums" are of the one that is summed in. ``weight`` is pack's, and factors
    are unpack's.
    """

    gradients: tuple[Gradient, ...]
    grad_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype | None = None
    wire_offset: int = 0
    scale_exponent: int | None = None
    multiplier: float = 1.0
    limit: float | None = None
    num_wires: int = 1
    sums: str = "wire to wire"
    with_residuals: bool = False
    values: str = "ordinary"
    seed: int = 0
    weight: float | None = None
    scale_share: float = 1.0
    with_factors: bool = False

    @property
    def wire(self) -> torch.dtype:
        return self.wire_dtype or self.grad_dtype

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.grad_dtype == torch.float64 else torch.float32

    def build(self, device: str) -> BuiltBucket:
        built = BuiltBucket(self, device)
        generator = torch.Generator().manual_seed(self.seed)

        def allocate(numel: int, offset: int, dtype: torch.dtype) -> Tensor:
            is_blocks = dtype in reference.BLOCK_BITS
            offset *= 4 if is_blocks else 1  # a block begins at a multiple of its scale's size
            storage = random_values(self.values, offset + numel + NUM_BEHIND, dtype, generator)
            if is_blocks:
                storage[offset : offset + numel] = random_blocks(self.values, numel, dtype, generator)
            built.storages.append(storage.to(device))
            return built.storages[-1][offset : offset + numel]

        built.grads = [
            allocate(math.prod(each.shape), each.offset, self.grad_dtype).view(each.shape) for each in self.gradients
        ]
        numels = [grad.numel() for grad in built.grads]
        num_values = reference.wire_numel(numels, self.wire)
        if self.wire in reference.BLOCK_BITS:
            num_values = num_values // reference.block_bytes(self.wire) * reference.BLOCK_VALUES
        elif "blocks" in self.sums:
            num_values -= num_values % reference.BLOCK_VALUES
        built.wires = self._rows(reference.wire_numel(numels, self.wire), self.wire, allocate)
        source, target = {
            "wire to wire": (self.wire, self.wire),
            "wire to sums": (self.wire, self.compute),
            "sums to wire": (self.compute, self.wire),
            "wire to bfloat16": (self.wire, torch.bfloat16),
            "wire to blocks": (self.wire, torch.uint8),
        }[self.sums]
        built.sources = self._rows(reference.wire_numel([num_values], source), source, allocate)
        built.out = allocate(reference.wire_numel([num_values], target), 0, target)
        if self.with_residuals:
            built.residuals = [allocate(numel, 0, self.compute) for numel in numels]
            built.residual = allocate(num_values, 0, self.compute)
        # What an operator is not to write has a value of its own, so that writing it shows.
        built.stats = -torch.arange(1.0, reference.NUM_STATS + 1, dtype=torch.float64, device=device)
        if self.scale_exponent is not None:
            built.bucket_scale = torch.tensor(math.ldexp(1.0, self.scale_exponent), device=device)
        if self.weight is not None:
            built.weight = torch.tensor(self.weight, dtype=torch.float64, device=device)
        if self.with_factors:
            some = [(1.0, 1.5, 7 / 3, 2.0**-20)[i % 4] for i in range(len(built.grads))]
            built.factors = torch.tensor(some, dtype=torch.float64, device=device)
        return built

    def _rows(self, numel: int, dtype: torch.dtype, allocate: Callable[[int, int, torch.dtype], Tensor]) -> Tensor:
        return allocate(self.num_wires * numel, self.wire_offset, dtype).view(self.num_wires, numel)


@dataclass
class BuiltBucket:
    """The tensors of a ``Bucket``; ``storages`` are the whole memory that all but the last three are part of."""

    bucket: Bucket
    device: str
    grads: list[Tensor] = field(default_factory=list)
    wires: Tensor = field(default_factory=lambda: torch.empty(0))
    sources: Tensor = field(default_factory=lambda: torch.empty(0))
    out: Tensor = field(default_factory=lambda: torch.empty(0))
    residuals: list[Tensor] | None = None
    residual: Tensor | None = None
    storages: list[Tensor] = field(default_factory=list)
    stats: Tensor = field(default_factory=lambda: torch.empty(0))
    bucket_scale: Tensor | None = None
    weight: Tensor | None = None
    factors: Tensor | None = None

    @property
    def wire(self) -> Tensor:
        return self.wires[0]

    def arguments(self, operator: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments for one of ``OPERATORS``."""
        bucket = self.bucket
        encoding = {"multiplier": bucket.multiplier, "limit": bucket.limit}
        if operator == "pack":
            encoding["weight"] = self.weight
            return (self.grads, self.wire, self.stats, self.bucket_scale, self.residuals), encoding
        if operator == "unpack":
            wires = self.wire if bucket.num_wires == 1 else self.wires
            factor = 1.0 if bucket.num_wires == 1 else bucket.multiplier
            options = {"multiplier": factor, "scale_share": bucket.scale_share, "factors": self.factors}
            return (wires, self.grads, self.stats, self.bucket_scale), options
        encoding |= {"grad_dtype": bucket.grad_dtype}
        return (self.sources, self.out, self.bucket_scale, self.residual), encoding


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of which every bit is random: of all magnitudes, subnormal, infinite and nan."""
    size = dtype.itemsize
    low = -(2 ** (8 * size - 1))
    integers = torch.randint(low, -low - 1, (numel,), generator=generator, dtype=torch.int64)
    return integers.to(_INTEGERS[size]).view(dtype)


def special_values(dtype: torch.dtype) -> Tensor:
    """The borders of ``dtype`` and of the 16-bit wires, the neighbours of the latter, and what is not finite."""
    borders = [0.0, 1.0, 2.0**-149, math.inf, math.nan]
    for each in (dtype, torch.float16, torch.bfloat16):
        info = torch.finfo(each)
        borders += [info.max, info.tiny, info.smallest_normal * info.eps, info.smallest_normal * info.eps / 2]
    borders += [65519.99, 65520.0, 1e5]
    return torch.tensor([*borders, *(-border for border in borders)], dtype=torch.float64).to(dtype)


def random_blocks(kind: str, num_bytes: int, wire: torch.dtype, generator: torch.Generator) -> Tensor:
    """Blocks of whole numbers with scales that are one of ``VALUES``."""
    size, largest = reference.block_bytes(wire), 2 ** (reference.BLOCK_BITS[wire] - 1) - 1
    num_blocks = num_bytes // size
    scales = random_values(kind, num_blocks, torch.float32, generator)
    values = torch.randint(-largest, largest + 1, (num_blocks, reference.BLOCK_VALUES), generator=generator)
    values[:, 0] = largest  # so that they are encoded as they are
    blocks = reference.encode_blocks(values.float().view(-1), wire).view(torch.uint8).view(num_blocks, size)
    return torch.cat([scales.view(torch.uint8).view(num_blocks, 4), blocks[:, 4:]], dim=1).view(-1).view(wire)


def random_values(kind: str, numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A vector of ``dtype`` on the CPU: one of ``VALUES``; of bytes, anything."""
    if dtype in reference.BLOCK_BITS:
        return torch.randint(256, (numel,), generator=generator, dtype=torch.uint8).view(dtype)
    ordinary = torch.randn(numel, generator=generator)
    if kind == "ordinary":
        return ordinary.to(dtype)
    if kind == "wide":  # over the exponents of float32 in which products and squares lose nothing or everything
        return (ordinary * torch.exp2(torch.randint(-120, 120, (numel,), generator=generator))).to(dtype)
    if kind == "tiny":  # around the smallest scale of a block, and subnormal
        return (ordinary * torch.exp2(torch.randint(-135, -105, (numel,), generator=generator))).to(dtype)
    if kind == "halves":  # between two steps of the block, whose largest value is either wire's largest number
        values = torch.randint(-7, 7, (numel,), generator=generator) + 0.5
        values[::256], values[128::256] = 127.0, 7.0
        return values.to(dtype)
    if kind == "bits":
        return random_bits(numel, dtype, generator)
    if kind == "zeros":
        return torch.copysign(torch.zeros(numel), ordinary).to(dtype)
    table = special_values(dtype)
    special = table[torch.randint(len(table), (numel,), generator=generator)]
    if kind == "special":
        return special
    if kind == "mostly_ordinary":  # so few that most blocks of 128 have one and most rows of 16 none
        return torch.where(torch.rand(numel, generator=generator) < 1 / 64, special, ordinary.to(dtype))
    raise ValueError(f"values: expected one of {VALUES}, got {kind!r}")


def sample_inputs(device: str) -> list[BuiltBucket]:
    """One bucket of every kind that the operators treat differently."""
    several = tuple(Gradient((2, 3, 4, 5), offset) for offset in range(4))
    sizes = (Gradient((1,)), Gradient((17,)), Gradient((300,)))
    half, bfloat16 = torch.float16, torch.bfloat16
    buckets = [
        Bucket((Gradient((7, 5)),)),
        Bucket(several, wire_dtype=half, wire_offset=1, scale_exponent=3, multiplier=1 / 3, limit=65504.0),
        Bucket((Gradient(()), Gradient((0,)), Gradient((2, 0, 3)), Gradient((4,), offset=1))),
        Bucket((Gradient((0,)), Gradient((0, 4))), wire_dtype=half, scale_exponent=0),
        Bucket(sizes, wire_dtype=bfloat16, multiplier=0.5, limit=1.0, values="special"),
        Bucket(sizes, torch.float64, half, scale_exponent=0, limit=65504.0, values="wide"),
        Bucket(sizes, half, bfloat16, multiplier=0.125),
        Bucket(sizes, bfloat16, scale_exponent=9, values="bits"),
        Bucket(several, wire_dtype=torch.uint8, wire_offset=1, with_residuals=True, values="mostly_ordinary"),
        Bucket(sizes, wire_dtype=torch.uint8, num_wires=3, multiplier=1 / 3),
        Bucket(several, wire_dtype=torch.int8, num_wires=2, with_residuals=True, values="mostly_ordinary"),
        Bucket(sizes, wire_dtype=half, num_wires=2, scale_exponent=5, multiplier=0.5, with_residuals=True),
        Bucket(sizes, torch.float64, bfloat16, num_wires=2, sums="wire to sums", with_residuals=True),
        Bucket((Gradient((256,)),), num_wires=2, sums="wire to blocks", with_residuals=True),
        Bucket(sizes, wire_dtype=half, scale_exponent=2, multiplier=1 / 3, weight=2.7, scale_share=0.25),
        Bucket(several, half, weight=8192.0, with_residuals=True, values="mostly_ordinary"),
        Bucket(sizes, half, num_wires=3, multiplier=1.0, values="special", scale_exponent=0, scale_share=1 / 3),
        Bucket(sizes, torch.float64, weight=1 / 3, with_residuals=True),
        Bucket(several, bfloat16, weight=0.0, values="special"),
        Bucket(several, wire_dtype=torch.uint8, weight=0.0, with_residuals=True, values="mostly_ordinary"),
        Bucket(several, wire_dtype=torch.uint8, num_wires=2, values="halves"),
        Bucket(several, wire_dtype=torch.int8, with_residuals=True, values="halves"),
        Bucket(sizes, wire_dtype=torch.uint8, num_wires=2, values="tiny"),
        Bucket(several, wire_dtype=half, scale_exponent=5, values="mostly_ordinary", with_factors=True),
        Bucket(13 * (Gradient((4100,)),), half, num_wires=2, values="special", with_factors=True),
    ]
    return [bucket.build(device) for bucket in buckets]


def _gradients() -> st.SearchStrategy[Gradient]:
    small = st.lists(st.integers(0, 9), max_size=4)
    flat = st.tuples(st.integers(0, 600))
    shapes = st.one_of(small.map(tuple), flat)
    return st.builds(Gradient, shapes, st.integers(0, 9))


@st.composite
def random_buckets(draw: st.DrawFn) -> Bucket:
    """Buckets of up to eight gradients."""
    grad_dtype = draw(st.sampled_from(GRAD_DTYPES))
    wire_dtype = draw(st.sampled_from(WIRE_DTYPES))
    limits = [None, 1.0, 1e-3] + [reference.saturation_limit(wire_dtype or grad_dtype, n) for n in (1, 2, 3, 64)]
    sums = ["wire to wire", "sums to wire"]
    if wire_dtype not in reference.BLOCK_BITS:  # whose blocks become nothing else
        sums += ["wire to sums", "wire to bfloat16", "wire to blocks"]
    return Bucket(
        gradients=tuple(draw(st.lists(_gradients(), min_size=1, max_size=8))),
        grad_dtype=grad_dtype,
        wire_dtype=wire_dtype,
        wire_offset=draw(st.integers(0, 9)),
        scale_exponent=draw(st.one_of(st.none(), st.integers(-20, 30), st.sampled_from([-126, -100, 100, 126]))),
        multiplier=draw(st.sampled_from([1.0, 1 / 2, 1 / 3, 1 / 8, 1e-3, -7.0])),
        limit=draw(st.sampled_from(limits)),
        num_wires=draw(st.integers(1, 8)),
        sums=draw(st.sampled_from(sums)),
        with_residuals=draw(st.booleans()),
        values=draw(st.sampled_from(VALUES)),
        seed=draw(st.integers(0, 2**31)),
        weight=draw(st.one_of(st.none(), st.sampled_from([0.0, 1.0, 1 / 3, 2.7, 8192.0]))),
        scale_share=draw(st.sampled_from([1.0, 0.5, 1 / 3])),
        with_factors=draw(st.booleans()),
    )
