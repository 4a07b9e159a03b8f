"""pack and unpack on a CPU against a copy of as many bytes, cat + mul + to, and torch._foreach.

Inputs rotate, so that what fits the cache is what would in training: nothing but the newest. ``python -m benchmarks
ops`` measures the same ways, in turns.
"""

from itertools import cycle

import pytest
import torch

from benchmarks.rivals.passes import COPY, PACKS, UNPACKS, WIRES, Buffers, Pass, is_right

NUM_TENSORS = 160
NUM_INPUT_SETS = 4
SIZES = {"4 MiB": 1 << 20, "25 MiB": 25 << 18, "256 MiB": 1 << 26}
COMPRESSED = ("fp16", "bf16")
CPU = torch.device("cpu")


def _measure(benchmark, what: str, way: Pass, numel: int, wire: str) -> None:
    sets = [Buffers(numel, NUM_TENSORS, WIRES[wire], CPU, seed) for seed in range(NUM_INPUT_SETS)]
    for buffers in sets:
        buffers.pack()
    rotation = cycle(sets)
    benchmark.extra_info.update(what=what, bytes=sets[0].nbytes, is_limit=what == COPY)
    benchmark.pedantic(
        way.run, setup=lambda: ((next(rotation),), {}), rounds=max(20, (1 << 26) // numel), warmup_rounds=NUM_INPUT_SETS
    )


@pytest.mark.parametrize("wire", WIRES)
def test_all_ways_give_the_same(wire: str) -> None:
    buffers = Buffers(1 << 16, NUM_TENSORS, WIRES[wire], CPU)
    assert [what for what, way in PACKS.items() if not is_right("pack", way, buffers)] == []
    assert [what for what, way in UNPACKS.items() if not is_right("unpack", way, buffers)] == []


@pytest.mark.parametrize("what", PACKS)
@pytest.mark.parametrize("wire", COMPRESSED)
@pytest.mark.parametrize("size", SIZES)
def test_pack(benchmark, size: str, wire: str, what: str) -> None:
    benchmark.group = f"pack {size} of float32 in {NUM_TENSORS} tensors to {wire}"
    _measure(benchmark, what, PACKS[what], SIZES[size], wire)


@pytest.mark.parametrize("what", UNPACKS)
@pytest.mark.parametrize("wire", COMPRESSED)
@pytest.mark.parametrize("size", SIZES)
def test_unpack(benchmark, size: str, wire: str, what: str) -> None:
    benchmark.group = f"unpack {wire} to {size} of float32 in {NUM_TENSORS} tensors"
    _measure(benchmark, what, UNPACKS[what], SIZES[size], wire)
