"""pack and unpack on a CPU against a copy of as many bytes, cat + mul + to, and torch._foreach.

The bytes of a pass are those it must read and write: 6 an element between float32 and a 16-bit wire. The copy reads and
writes as many. Inputs rotate, so that what fits the cache is what would in training: nothing but the newest.
"""

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor

import fastsync  # noqa: F401  registers torch.ops.fastsync
from fastsync import reference

NUM_TENSORS = 160
NUM_INPUT_SETS = 4
SIZES = {"4 MiB": 1 << 20, "25 MiB": 25 << 18, "256 MiB": 1 << 26}
WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}

ops = torch.ops.fastsync


class Buffers:
    """Gradients of ``numel`` float32 values in all, in NUM_TENSORS uneven tensors, and all that the ways need."""

    def __init__(self, numel: int, wire: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        cuts = torch.randint(1, numel, (NUM_TENSORS - 1,), generator=generator).sort().values.tolist()
        lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, numel], strict=True)]
        self.grads = [torch.randn(n, generator=generator) for n in lengths]
        self.wire = torch.zeros(numel, dtype=wire)
        self.stats = torch.zeros(reference.NUM_STATS, dtype=torch.float64)
        self.limit = reference.saturation_limit(wire, 2)
        self.copy_source = torch.ones(numel * 6 // 2, dtype=torch.int8)
        self.copy_target = torch.zeros_like(self.copy_source)

    def copy(self) -> None:
        self.copy_target.copy_(self.copy_source)

    def pack(self) -> None:
        ops.pack(self.grads, self.wire, self.stats, None, multiplier=0.5, limit=self.limit)

    def pack_cat(self) -> None:
        self.wire = torch.cat([grad.reshape(-1) for grad in self.grads]).mul_(0.5).to(self.wire.dtype)

    def pack_foreach(self) -> None:
        parts = list(self.wire.split([grad.numel() for grad in self.grads]))
        torch._foreach_copy_(parts, torch._foreach_mul(self.grads, 0.5))

    def unpack(self) -> None:
        ops.unpack(self.wire, self.grads, self.stats)

    def unpack_split(self) -> None:
        parts = self.wire.to(torch.float32).split([grad.numel() for grad in self.grads])
        for grad, part in zip(self.grads, parts, strict=True):
            grad.copy_(part)

    def unpack_split_and_norm(self) -> None:
        self.unpack_split()
        torch.nn.utils.get_total_norm(self.grads)

    def unpack_foreach(self) -> None:
        torch._foreach_copy_(self.grads, list(self.wire.split([grad.numel() for grad in self.grads])))


PACKS = {
    "copy of as many bytes": Buffers.copy,
    "fastsync.pack": Buffers.pack,
    "cat + mul + to": Buffers.pack_cat,
    "_foreach_mul + _foreach_copy": Buffers.pack_foreach,
}
UNPACKS = {
    "copy of as many bytes": Buffers.copy,
    "fastsync.unpack, with norm": Buffers.unpack,
    "to + split + copy": Buffers.unpack_split,
    "to + split + copy, then norm": Buffers.unpack_split_and_norm,
    "_foreach_copy": Buffers.unpack_foreach,
}


def _measure(benchmark, what: str, way: Callable[[Buffers], None], numel: int, wire: torch.dtype) -> None:
    sets = [Buffers(numel, wire) for _ in range(NUM_INPUT_SETS)]
    for buffers in sets:
        buffers.pack()
    rotation = cycle(sets)
    benchmark.extra_info.update(what=what, bytes=6 * numel, is_limit=way is Buffers.copy)
    benchmark.pedantic(
        way, setup=lambda: ((next(rotation),), {}), rounds=max(20, (1 << 26) // numel), warmup_rounds=NUM_INPUT_SETS
    )


def _check(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result, expected), "the rivals do not compute the same"


@pytest.mark.parametrize("wire", WIRES)
def test_all_ways_give_the_same(wire: str) -> None:
    buffers = Buffers(1 << 16, WIRES[wire])
    wires = []
    for way in (Buffers.pack, Buffers.pack_cat, Buffers.pack_foreach):
        way(buffers)
        wires.append(buffers.wire.clone())
    _check(wires[1], wires[0])
    _check(wires[2], wires[0])
    grads = []
    for way in (Buffers.unpack, Buffers.unpack_split, Buffers.unpack_foreach):
        way(buffers)
        grads.append(torch.cat(buffers.grads))
    _check(grads[1], grads[0])
    _check(grads[2], grads[0])


@pytest.mark.parametrize("way", PACKS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", SIZES)
def test_pack(benchmark, size: str, wire: str, way: str) -> None:
    benchmark.group = f"pack {size} of float32 in {NUM_TENSORS} tensors to {wire}"
    _measure(benchmark, way, PACKS[way], SIZES[size], WIRES[wire])


@pytest.mark.parametrize("way", UNPACKS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", SIZES)
def test_unpack(benchmark, size: str, wire: str, way: str) -> None:
    benchmark.group = f"unpack {wire} to {size} of float32 in {NUM_TENSORS} tensors"
    _measure(benchmark, way, UNPACKS[way], SIZES[size], WIRES[wire])
