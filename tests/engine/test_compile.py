"""torch.compile: how much of what ranks send is on its way before backward has computed its last gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import fastsync
from tests.models import assert_all_bitwise_equal, assert_same_on_all_ranks, grads_of
from tests.ranks import on_ranks

WIDTH = 512  # a layer of which is the MiB that DDP's first bucket takes
IS_EARLY = {
    "attach, eager": True,
    "attach, whole": False,
    "attach, blocks": True,
    "hook, eager": True,
    "hook, whole": False,
    "hook, DDPOptimizer": True,
}


class Block(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, WIDTH) for _ in range(5)))


def _early_packs(model: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[int, int]:
    """How many buckets are packed before the last product of matrices begins, and how many in all."""
    loss = model(inputs).square().mean()
    with profile() as profiler:
        loss.backward()
    packs, products = (
        [event.time_range.start for event in profiler.events() if event.name == name]
        for name in ("fastsync::pack", "aten::mm")
    )
    return sum(begin < max(products) for begin in packs), len(packs)


@on_ranks(2)
def test_what_overlaps_with_backward(rank: int, world_size: int) -> None:
    """All ways on the same ranks, for each rank that compiles takes a second for what it imports."""
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    for how, is_early in IS_EARLY.items():
        torch._dynamo.reset()
        entry_point, _, what = how.partition(", ")
        net, reference = _net(), DistributedDataParallel(_net())
        model: Callable[[Tensor], Tensor] = net
        if entry_point == "attach":
            if what == "blocks":
                for block in net:
                    block.compile(backend="aot_eager", fullgraph=True)  # which raises at a graph break
            fastsync.attach(net, bucket_cap_mb=1)
            if what == "whole":
                model = torch.compile(net, backend="aot_eager", fullgraph=True)
        else:
            ddp = DistributedDataParallel(net, bucket_cap_mb=1)
            fastsync.register_comm_hook(ddp)
            torch._dynamo.config.optimize_ddp = what == "DDPOptimizer"
            model = ddp if what == "eager" else torch.compile(ddp, backend="aot_eager")
        for _ in range(3):
            for each, module in ((model, net), (reference, reference)):
                module.zero_grad()
                each(inputs).square().mean().backward()
            assert_same_on_all_ranks(grads_of(net))
            assert_all_bitwise_equal(grads_of(net), grads_of(reference), how)
        num_early, num_packs = _early_packs(model, inputs)
        assert num_packs >= 5
        assert (num_early >= 3) == is_early, f"{how}: {num_early} of {num_packs} began before the end"
