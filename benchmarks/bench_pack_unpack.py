"""pack and unpack on a CPU against a copy of as many bytes, cat + mul + to, and torch._foreach.

Inputs rotate, so that what fits the cache is what would in training: nothing but the newest. ``python -m benchmarks
ops`` measures the same ways, in turns.
"""

from itertools import cycle

import pytest
import torch

from benchmarks.baselines.passes import PASSES, WIRES, Buffers, is_right

NUM_TENSORS = 160
NUM_INPUT_SETS = 4
SIZES = {"4 MiB": 1 << 20, "25 MiB": 25 << 18, "256 MiB": 1 << 26}
COMPRESSED = ("fp16", "bf16")
CPU = torch.device("cpu")
ALL = [(name, what) for name, ways in PASSES.items() for what in ways]


@pytest.mark.parametrize("wire", WIRES)
def test_all_ways_give_the_same(wire: str) -> None:
    buffers = Buffers(1 << 16, NUM_TENSORS, WIRES[wire], CPU)
    assert [(name, what) for name, what in ALL if not is_right(name, PASSES[name][what], buffers)] == []


@pytest.mark.parametrize(("name", "what"), ALL)
@pytest.mark.parametrize("wire", COMPRESSED)
@pytest.mark.parametrize("size", SIZES)
def test_pass(benchmark, size: str, wire: str, name: str, what: str) -> None:
    numel, way = SIZES[size], PASSES[name][what]
    sets = [Buffers(numel, NUM_TENSORS, WIRES[wire], CPU, seed) for seed in range(NUM_INPUT_SETS)]
    for buffers in sets:
        buffers.pack()
    rotation = cycle(sets)
    benchmark.group = f"{name} {size} of float32 in {NUM_TENSORS} tensors, {wire}"
    benchmark.extra_info.update(what=what, bytes=sets[0].nbytes)
    benchmark.pedantic(
        way.run, setup=lambda: ((next(rotation),), {}), rounds=max(20, (1 << 26) // numel), warmup_rounds=NUM_INPUT_SETS
    )
