"""At full width nobody reads the means for ``grad_stats()`` before it was called, if nothing else is left to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastsync
from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.fake_device import DEVICE, watched
from tests.models import SMALL_BUCKETS, Given, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

SHAPES = [(7, 33), (300,), (513, 7)]
QUIET_STEPS = 3  # by then DDP has made its buckets anew
NUM_SUMS = 3
PASSES = {"fastsync::pack", "fastsync::unpack"}


class _Training:
    def __init__(self, device: str = "cpu", group: dist.ProcessGroup | None = None, *, views: bool = False) -> None:
        model = Given(random_grads(0, 0, SHAPES, torch.float32)).to(device)
        options = {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": views}
        self.ddp = DistributedDataParallel(model, process_group=group, **options)
        self.hook = fastsync.register_comm_hook(self.ddp)
        self._device = device

    def step(self, number: int) -> None:
        grads: list[Tensor | None] = [
            grad.to(self._device) for grad in random_grads(dist.get_rank(), number, SHAPES, torch.float32)
        ]
        self.ddp.zero_grad()
        self.ddp(grads).backward()

    def passes_of_a_step(self, number: int) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step(number)
        return [event.name for event in profiler.events() if event.name in PASSES]

    def stats(self) -> Tensor:
        return self.hook.grad_stats()._sums.cpu()


def _leaves_statistics_out(device: str, group: dist.ProcessGroup | None = None) -> None:
    asked, training = _Training(device, group), _Training(device, group)
    for step in range(QUIET_STEPS):
        for each in (asked, training):
            each.step(step)
        asked.stats()
    assert training.passes_of_a_step(QUIET_STEPS) == []
    asked.step(QUIET_STEPS)
    assert_bitwise_equal(training.stats(), asked.stats())
    assert training.passes_of_a_step(QUIET_STEPS + 1) == ["fastsync::unpack"] * len(training.hook.stats().buckets)
    asked.step(QUIET_STEPS + 1)
    assert_bitwise_equal(training.stats(), asked.stats())


@on_ranks(1)
def test_nobody_reads_the_means_before_somebody_asks(rank: int, world_size: int) -> None:
    _leaves_statistics_out("cpu")


@fake_device.on_ranks(2)
def test_nobody_reads_the_means_on_a_device(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    with watched():
        _leaves_statistics_out(DEVICE, group)


@on_ranks(1, cases={"views": [False, True]})
def test_statistics_have_to_be_asked_for_before_gradients_change(rank: int, world_size: int, views: bool) -> None:
    training = _Training(views=views)
    training.step(0)
    training.step(1)
    expected = torch.nn.utils.get_total_norm([p.grad for p in training.ddp.parameters() if p.grad is not None])
    torch._foreach_mul_([p.grad for p in training.ddp.parameters() if p.grad is not None], 2.0)
    if views:
        for _ in range(2):
            refused(lambda: training.stats(), "call grad_stats() before they are clipped", kind=RuntimeError)
        training.step(1)
        torch._foreach_mul_([p.grad for p in training.ddp.parameters() if p.grad is not None], 2.0)
    torch.testing.assert_close(training.hook.grad_stats().grad_norm, expected, rtol=1e-6, atol=0.0)


@on_ranks(1)
def test_means_that_are_gone_have_no_statistics(rank: int, world_size: int) -> None:
    training = _Training()
    training.step(0)
    hook = training.hook
    del training
    refused(lambda: hook.grad_stats(), "call grad_stats() before they are clipped", kind=RuntimeError)


@on_ranks(1, cases={"op": ["mean", "mean_of_used", "sum"]})
def test_a_rank_alone_makes_no_pass_before_somebody_asks(rank: int, world_size: int, op: Any) -> None:
    models = [Given(random_grads(0, 0, SHAPES, torch.float32)) for _ in range(2)]
    asked, quiet = (fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, op=op) for model in models)

    def step(model: Given, number: int) -> list[str]:
        grads: list[Tensor | None] = [*random_grads(0, number, SHAPES, torch.float32)]
        if number > QUIET_STEPS:  # the first keeps its gradient, and the second has none
            grads[0] = grads[1] = None
            model.weights[1].grad = None
        model.weights[2].grad = None
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(grads).backward()
        return [event.name for event in profiler.events() if event.name in PASSES]

    for number in range(QUIET_STEPS + 2):
        step(models[0], number)
        expected = asked.grad_stats()._sums[:NUM_SUMS]
        assert step(models[1], number) == []
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
    # Of kept gradients torch takes the statistics, which adds in another order.
    torch.testing.assert_close(quiet.grad_stats()._sums[:NUM_SUMS], expected, rtol=1e-6, atol=0.0)
    assert set(step(models[1], 0)) == PASSES
