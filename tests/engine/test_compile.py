"""torch.compile: how much of what ranks send is on its way before backward has computed its last gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import fastsync
from tests.models import assert_all_bitwise_equal, assert_same_on_all_ranks, grads_of
from tests.ranks import run_ranks

WIDTH = 512  # a layer of which is the MiB that DDP's first bucket takes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def _compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, backend="aot_eager", fullgraph=True)  # which raises at a graph break


def _early_packs(model: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[int, int]:
    """How many buckets are packed before the last product of matrices begins, and how many in all."""
    loss = model(inputs).square().mean()
    with profile() as profiler:
        loss.backward()
    begin_of = {name: [e.time_range.start for e in profiler.events() if e.name == name] for name in (PACK, PRODUCT)}
    return sum(begin < max(begin_of[PRODUCT]) for begin in begin_of[PACK]), len(begin_of[PACK])


PACK, PRODUCT = "fastsync::pack", "aten::mm"


def _overlaps(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """All ways on the same ranks, for each rank that compiles takes a second for what it imports."""
    return {how: _overlap(rank, how) for how in IS_EARLY}


def _overlap(rank: int, how: str) -> tuple[int, int]:
    torch._dynamo.reset()
    entry_point, _, what = how.partition(", ")
    net, reference = Net(), DistributedDataParallel(Net())
    model: Callable[[Tensor], Tensor]
    if entry_point == "attach":
        if what == "blocks":
            for block in net.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        fastsync.attach(net, bucket_cap_mb=1)
        model = _compiled(net) if what == "whole" else net
    else:
        ddp = DistributedDataParallel(net, bucket_cap_mb=1)
        fastsync.register_comm_hook(ddp)
        torch._dynamo.config.optimize_ddp = what == "DDPOptimizer"
        model = ddp if what == "eager" else torch.compile(ddp, backend="aot_eager")
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        for each in (model, reference):
            (net if each is model else reference).zero_grad()
            each(inputs).square().mean().backward()
        assert_same_on_all_ranks(grads_of(net))
        assert_all_bitwise_equal(grads_of(net), grads_of(reference), how)
    num_early, num_packs = _early_packs(model, inputs)
    return num_early, num_packs


IS_EARLY = {
    "attach, eager": True,
    "attach, whole": False,
    "attach, blocks": True,
    "hook, eager": True,
    "hook, whole": False,
    "hook, DDPOptimizer": True,
}


@pytest.fixture(scope="module")
def overlaps() -> list[dict[str, tuple[int, int]]]:
    return run_ranks(_overlaps, 2)


@pytest.mark.parametrize("how", IS_EARLY)
def test_what_overlaps_with_backward(how: str, overlaps: list[dict[str, tuple[int, int]]]) -> None:
    for of_rank in overlaps:
        num_early, num_packs = of_rank[how]
        assert num_packs >= 5
        assert (num_early >= 3) == IS_EARLY[how], f"{num_early} of {num_packs} began before the end"
