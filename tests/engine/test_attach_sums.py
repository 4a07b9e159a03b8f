"""attach with op="sum": what a sync has summed stays what it is when another backward adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from tests.engine.entry_points import Averaged, average
from tests.ranks import on_ranks
from tests.refused import refused

WAYS = ("attach", "synchronize")


class Weights(nn.Module):
    """Takes the gradients of its two parameters, as whole numbers; None leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.second = (nn.Parameter(torch.zeros(300)) for _ in range(2))

    def forward(self, *grads: float | None) -> Tensor:
        pairs = zip((self.both, self.second), grads, strict=True)
        return torch.stack([(weight * grad).sum() for weight, grad in pairs if grad is not None]).sum()


def sums(entry_point: str, compression: Any = "none") -> tuple[Averaged, Weights]:
    model = Weights()
    return average(entry_point, model, compression, op="sum"), model


def values(model: nn.Module) -> list[list[float] | None]:
    return [None if weight.grad is None else weight.grad.unique().tolist() for weight in model.parameters()]


def assert_norm(given: Averaged, model: nn.Module) -> None:
    expected = nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(given.grad_norm(), expected, rtol=1e-6, atol=0.0)


@on_ranks(2, cases={"entry_point": WAYS})
def test_a_change_in_place_that_nobody_can_follow(rank: int, world_size: int, entry_point: str) -> None:
    given, model = sums(entry_point)
    given.backward(model(rank + 1.0, 1.0))
    with given.no_sync():
        model(10.0, 10.0).backward()
    for weight in model.parameters():
        weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="was changed in place after a backward inside no_sync"):
        given.backward(model(rank + 1.0, 1.0))
    model.zero_grad()
    given.backward(model(rank + 1.0, 1.0))
    assert values(model) == [[3.0], [2.0]]
    # After zero_grad(set_to_none=False) any change means the same to both.
    model.zero_grad(set_to_none=False)
    with given.no_sync():
        model(10.0, 10.0).backward()
    for weight in model.parameters():
        weight.grad.mul_(0.5)
    given.backward(model(rank + 1.0, 1.0))
    assert values(model) == [[13.0], [12.0]]


@on_ranks(2, cases={"entry_point": WAYS})
def test_synchronize_by_hand(rank: int, world_size: int, entry_point: str) -> None:
    """What has been summed is not summed once more. What is written by hand counts."""
    given, model = sums(entry_point)
    given.backward(model(rank + 1.0, 1.0))
    for _ in range(2):
        given.handle.synchronize()
        assert values(model) == [[3.0], [2.0]]
        assert_norm(given, model)
    with given.no_sync():
        model(rank + 1.0, None).backward()
    given.handle.synchronize()
    assert values(model) == [[6.0], [2.0]]
    model.both.grad = torch.full((300,), 1.0 + rank)
    model.second.grad.fill_(1.0)
    given.handle.synchronize()
    assert values(model) == [[3.0], [2.0]]
    if rank == 0:
        model.both.grad = None
    given.handle.synchronize()
    assert values(model) == [[3.0] if rank else None, [2.0]]


@on_ranks(2, cases={"entry_point": WAYS})
def test_what_is_no_accumulation_changes_nothing(rank: int, world_size: int, entry_point: str) -> None:
    given, model = sums(entry_point)
    given.backward(model(rank + 1.0, 1.0))
    torch.autograd.grad(model(7.0, 7.0), list(model.parameters()))
    assert values(model) == [[3.0], [2.0]]
    (model(5.0, 5.0)).backward(inputs=[model.second])
    given.finish()
    assert values(model) == [[3.0], [12.0]]
    torch.autograd.backward([model(rank + 1.0, 1.0), model(rank + 1.0, None)])
    given.finish()
    assert values(model) == [[9.0], [14.0]]


@on_ranks(2)
def test_hooks_of_python_and_a_sum(rank: int, world_size: int) -> None:
    """The first one takes the hooks of C++ with it until the next gradient: that backward is refused, or right."""
    given, model = sums("attach")
    given.backward(model(rank + 1.0, 1.0))
    model.both.register_hook(lambda grad: grad * 2)
    refused(lambda: model(rank + 1.0, None).backward(), "added this rank's gradient to the sum", kind=RuntimeError)
    model.zero_grad()
    for expected in (6.0, 12.0):
        given.backward(model(rank + 1.0, 1.0))
        assert values(model)[0] == [expected]


@on_ranks(2, cases={"entry_point": WAYS})
def test_another_group_and_the_end(rank: int, world_size: int, entry_point: str) -> None:
    """A sum stays one in another group; detach() leaves .grad as whoever reads it expects it."""
    given, model = sums(entry_point)
    given.backward(model(rank + 1.0, 1.0))
    with given.no_sync():
        model(1.0, None).backward()
    given.handle.use_group(dist.new_group())
    given.backward(model(rank + 0.5, 1.0))
    assert values(model) == [[7.0], [4.0]]
    with given.no_sync():
        model(1.0, None).backward()
    given.handle.detach()
    assert values(model) == [[8.0], [4.0]]


# ---- weights and accumulation ---------------------------------------------------------------------------------------

TOKENS = ((1, 9), (5, 2))
"""Of each rank and micro-batch."""


@on_ranks(2, cases={"entry_point": WAYS})
def test_token_weights_with_accumulation(rank: int, world_size: int, entry_point: str) -> None:
    """As the guide has it. A weight for each micro-batch is refused, for one counts for all that a sync averages."""
    weight = nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([weight])
    given = average(entry_point, model)
    mean = 98 / 17

    def micro_batches(total: int, before: Callable[[int], None]) -> None:
        for index, tokens in enumerate(TOKENS[rank]):
            before(tokens)
            with given.no_sync() if index == 0 else nullcontext():
                ((weight * (10.0 * rank + index + 1)).sum() * (tokens / total)).backward()
        given.finish()

    for _ in range(2):
        total = sum(TOKENS[rank])
        given.handle.set_weight(total)
        micro_batches(total, lambda tokens: None)
        torch.testing.assert_close(weight.grad, torch.full((3,), mean))
        weight.grad = None
        with pytest.raises(RuntimeError, match=r"set_weight\(\) was called after a backward whose gradients.* 0, no"):
            micro_batches(1, given.handle.set_weight)
        weight.grad = None


@on_ranks(2, cases={"overlap": [True, False]})
def test_a_weight_may_be_set_again_where_no_backward_came(rank: int, world_size: int, overlap: bool) -> None:
    """As where a batch is skipped, after gradients that were averaged have been clipped or filled with zeros."""
    model = nn.Linear(2, 1)
    sync = fastsync.attach(model, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for set_to_none in (True, False):
        sync.set_weight(1.0 + rank)
        model(torch.ones(1, 2) + rank).sum().backward()
        if not overlap:
            sync.synchronize()
        fastsync.clip_grad_norm_(sync, 0.1)
        optimizer.step()
        sync.set_weight(5.0)
        optimizer.zero_grad(set_to_none=set_to_none)
        sync.set_weight(6.0)


class _AddsUp(torch.autograd.Function):
    """A collective of the user's own inside backward, as SyncBatchNorm has some."""

    @staticmethod
    def forward(context: Any, values: Tensor, step: int) -> Tensor:
        context.step = step
        return values.clone()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        if dist.get_rank() == 0:
            _store().set(f"rank 0 waits in step {context.step}", "")
        total = grads[0].clone()
        dist.all_reduce(total)
        return total, None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@on_ranks(2, cases={"overlap": [True, False]}, shared_memory=False)
def test_a_collective_inside_backward_beside_weights(rank: int, world_size: int, overlap: bool) -> None:
    """Whether weights have come when a bucket is full depends on time, and the order of collectives must not."""
    size = 300
    early = [nn.Parameter(torch.zeros(size)) for _ in range(2)]
    late = nn.Parameter(torch.zeros(size))
    sync = fastsync.attach([late, *early], "fp16", bucket_cap_mb=size * 4 / 2**20, overlap=overlap)
    sync.set_weight(1.0)
    for step in range(3):
        for parameter in (late, *early):
            parameter.grad = None
        hidden = _AddsUp.apply(late * (1.0 + rank), step)
        loss = ((hidden + early[1]) * (1.0 + rank) + early[0] * (1.0 + rank)).sum()
        if step > 0 and rank == 1:  # rank 0 has nobody's weight but its own when it gets to its collective
            _store().wait([f"rank 0 waits in step {step}"])
            hook = early[1].register_post_accumulate_grad_hook(lambda parameter: time.sleep(0.1))
        loss.backward()
        if not overlap:
            sync.synchronize()
        if step > 0 and rank == 1:
            hook.remove()
        assert [parameter.grad.unique().tolist() for parameter in (late, *early)] == [[4.5], [1.5], [1.5]], step
