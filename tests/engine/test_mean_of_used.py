"""attach with op="mean_of_used": the mean of a parameter is over the ranks that have a gradient for it in this step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from fastsync.sync.synchronizer import GradientSynchronizer
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.entry_points import average, whole_numbers
from tests.models import SMALL_BUCKETS, Given, assert_same_on_all_ranks, grads_of, random_grads
from tests.ranks import on_ranks
from tests.refused import refused

WAYS = ("attach", "synchronize")
ADDED_BY_RANKS = Compression(reduce="fp32", algorithm="one_shot")
SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]
USERS = (
    ({0, 1, 2}, {0}, {1, 2}, set()),
    ({0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}),
    ({1}, {0, 2}, set(), {0, 1, 2}),
    ({2, 1}, {1}, {0, 1, 2}, {0}),
)
"""For each step and parameter, the ranks that use it."""


def used(everyone: Sequence[Sequence[Tensor]], of_parameters: Sequence[set[int]]) -> list[list[Tensor | None]]:
    """The gradients of all ranks, each with those alone that it uses."""
    return [
        [grad if rank in users else None for grad, users in zip(grads, of_parameters, strict=True)]
        for rank, grads in enumerate(everyone)
    ]


def assert_norm(sync: GradientSynchronizer, model: nn.Module) -> None:
    expected = nn.utils.get_total_norm(grads_of(model))
    torch.testing.assert_close(sync.grad_stats().grad_norm, expected, rtol=1e-6, atol=0.0)


def assert_are(model: Given, expected: Sequence[Tensor | None], what: str) -> None:
    for index, (weight, right) in enumerate(zip(model.weights, expected, strict=True)):
        assert (weight.grad is None) == (right is None), f"{what}, parameter {index}"
        if right is not None:
            assert_bitwise_equal(weight.grad, right, f"{what}, parameter {index}")


@on_ranks(3, cases={"entry_point": WAYS, "shared_memory": [True, False]})
def test_the_bits_are_the_references(rank: int, world_size: int, entry_point: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        like = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
        given = average(entry_point, Given(like), ADDED_BY_RANKS, op="mean_of_used")
        for step in range(len(USERS)):
            everyone = [random_grads(other, step, SHAPES, dtype) for other in range(world_size)]
            there = used(everyone, USERS[step])
            given.step(there[rank])
            as_reals = [
                [None if g is None else torch.view_as_real(g) if g.is_complex() else g for g in of] for of in there
            ]
            expected = reference.mean_of_used(as_reals, reduce="fp32")
            if dtype.is_complex:
                expected = [None if each is None else torch.view_as_complex(each) for each in expected]
            assert_are(given.model, expected, f"{dtype}, step {step}")  # type: ignore[arg-type]
            assert_same_on_all_ranks([torch.view_as_real(g) if g.is_complex() else g for g in grads_of(given.model)])
            if dtype == torch.float32:
                assert_norm(given.handle, given.model)
        given.handle.detach()


@on_ranks(3)
def test_weights_of_the_ranks_that_have_a_gradient(rank: int, world_size: int) -> None:
    model = Given(random_grads(0, 0, SHAPES, torch.float32))
    sync = fastsync.attach(model, op="mean_of_used", bucket_cap_mb=SMALL_BUCKETS)
    for weights in ([1.0, 3.0, 2.5], [8192.0, 8191.0, 1e6], [3e299, 1e299, 2e299], [1e-20, 1.0, 7.0], [0.0, 0.0, 2.0]):
        for step in range(len(USERS)):
            there = used([random_grads(other, step, SHAPES, torch.float32) for other in range(world_size)], USERS[step])
            model.zero_grad()
            sync.set_weight(weights[rank])
            model(there[rank]).backward()
            assert_are(model, reference.mean_of_used(there, weights=weights, reduce="fp32"), f"{weights}, step {step}")
            for weight, same in zip(model.weights, zip(*there, strict=True), strict=True):
                pairs = [(w, grad.double()) for w, grad in zip(weights, same, strict=True) if grad is not None]
                if pairs:
                    expected = sum(w * grad for w, grad in pairs) / (sum(w for w, _ in pairs) or 1.0)
                    torch.testing.assert_close(weight.grad, expected.float(), rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]
            assert_norm(sync, model)


@on_ranks(3)
def test_lowrank_feeds_errors_back(rank: int, world_size: int) -> None:
    """The mean of many equal steps is right."""
    model = Given(whole_numbers(0, 0, SHAPES))
    sync = fastsync.attach(model, "lowrank", op="mean_of_used", bucket_cap_mb=SMALL_BUCKETS)
    num_steps = 100
    for pattern in (0, 2):
        there = used([whole_numbers(other, 0, SHAPES) for other in range(world_size)], USERS[pattern])
        expected = reference.mean_of_used(there)
        total = [torch.zeros(shape) for shape in SHAPES]
        for _ in range(num_steps):
            model.zero_grad()
            model(there[rank]).backward()
            for each, weight in zip(total, model.weights, strict=True):
                each += 0.0 if weight.grad is None else weight.grad / num_steps
            assert_same_on_all_ranks(grads_of(model))
            assert_norm(sync, model)
        for mean, weight, right in zip(total, model.weights, expected, strict=True):
            assert (weight.grad is None) == (right is None)
            torch.testing.assert_close(mean, torch.zeros_like(mean) if right is None else right, rtol=0.05, atol=0.5)


@on_ranks(3, cases={"wire": ["none", "fp16", "int8+ef"]})
def test_where_all_ranks_use_all_the_bits_are_those_of_mean(rank: int, world_size: int, wire: str) -> None:
    """With weights, too."""
    models = {op: Given(random_grads(0, 0, SHAPES, torch.float32)) for op in ("mean", "mean_of_used")}
    syncs = {op: fastsync.attach(model, wire, op=op) for op, model in models.items()}
    for step in range(4):
        grads = random_grads(rank, step, SHAPES, torch.float32)
        for op, model in models.items():
            if step >= 2:
                syncs[op].set_weight((1.0, 7.0, 1.0)[rank])  # in float32 their shares do not add up
            model.zero_grad()
            model(grads).backward()
        for one, other in zip(*(model.weights for model in models.values()), strict=True):
            assert_bitwise_equal(one.grad, other.grad, f"step {step}")
        norms = [sync.grad_stats().grad_norm for sync in syncs.values()]
        assert torch.equal(*norms), f"step {step}: {norms}"


@on_ranks(3)
def test_finite_stays_finite(rank: int, world_size: int) -> None:
    """A third of float16's largest value is rounded up, and weights may be as far apart as floats are."""
    model, ones = Given([torch.zeros(4, dtype=torch.float16), torch.zeros(4), torch.zeros(4)]), torch.ones(4)
    sync = fastsync.attach(model, op="mean_of_used")
    extreme = torch.tensor([65504.0, -65504.0, math.inf, 1.0], dtype=torch.float16)
    model([extreme if rank == 1 else None, None, ones]).backward()
    assert model.weights[0].grad.tolist() == [65504.0, -65504.0, math.inf, 1.0]
    for least in (1e-38, 1e-42, 1e-300):
        model.zero_grad()
        sync.set_weight(least if rank == 1 else 1.0)
        model([None, ones if rank == 1 else None, ones]).backward()
        assert model.weights[1].grad.isfinite().all(), least


class Heads(nn.Module):
    """A body that each rank uses, and heads of which a rank uses some: their gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Parameter(torch.zeros(5)) for _ in range(3))

    def forward(self, body: float, first: float | None = None, second: float | None = None) -> Tensor:
        pairs = ((self.body, body), (self.first, first), (self.second, second))
        return torch.stack([(weight * grad).sum() for weight, grad in pairs if grad is not None]).sum()

    def grads(self) -> list[float | None]:
        values = [None if weight.grad is None else weight.grad.unique().tolist() for weight in self.parameters()]
        assert all(each is None or len(each) == 1 for each in values)
        return [None if each is None else each[0] for each in values]


@on_ranks(2, cases={"set_to_none": [True, False]})
def test_accumulation(rank: int, world_size: int, set_to_none: bool) -> None:
    """A rank has a gradient if one of its backwards since the sync before has made one."""
    model = Heads()
    sync = fastsync.attach(model, op="mean_of_used")
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        with sync.no_sync():
            model(1.0 + rank, first=8.0 if rank == 0 else None).backward()
        model(1.0 + rank, second=6.0 if rank == 1 else None).backward()
        assert model.grads() == [3.0, 8.0, 6.0]
        assert_norm(sync, model)
        # A second backward adds its mean to the first.
        model(1.0 + rank, second=2.0 if rank == 0 else None).backward()
        assert model.grads() == [4.5, 8.0, 8.0]
        assert_norm(sync, model)
        with sync.no_sync():
            model(0.0, first=1.0 + rank, second=4.0 if rank == 1 else None).backward()
        sync.synchronize()
        assert model.grads() == [4.5, 9.5, 12.0]
        sync.synchronize()
        assert model.grads() == [4.5, 9.5, 12.0], "nothing has come"
        assert_norm(sync, model)


@on_ranks(2)
def test_synchronize_by_hand(rank: int, world_size: int) -> None:
    model = Heads()
    sync = fastsync.attach(model, op="mean_of_used", overlap=False)
    for _ in range(2):
        model.zero_grad()
        model(1.0 + rank, first=8.0 if rank == 0 else None).backward()
        sync.synchronize()
        assert model.grads() == [1.5, 8.0, None]
        model(0.0, second=2.0 if rank == 1 else None).backward()
        sync.synchronize()
        assert model.grads() == [1.5, 8.0, 2.0]
        if rank == 0:
            model.first.grad.fill_(3.0)  # counts, as what was written by hand does
        sync.synchronize()
        assert model.grads() == [1.5, 3.0, 2.0]


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    model = Heads()
    refused(lambda: fastsync.attach(model, op="mean_used"), "op:")
    optimizer = torch.optim.AdamW(model.parameters())
    sync = fastsync.attach(model, op="mean_of_used")
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    sync.detach()
    refused(lambda: fastsync.register_comm_hook(DistributedDataParallel(Heads()), op="mean_of_used"), "op:")
    with pytest.raises(ValueError, match="rank 0: op mean; rank 1: op mean_of_used"):
        fastsync.attach(model, op=("mean", "mean_of_used")[rank])
