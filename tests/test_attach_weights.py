"""Sums and weighted means over ranks: whose gradients count how much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Fails,
    Given,
    assert_same_on_all_ranks,
    grads_of,
    random_grads,
)
from tests.ranks import run_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]
WIRES = ("none", "bf16", "fp16", "int8", "fp16+fp32", "int8+ef")
# Of what an average over so many may be off, in shares of the largest gradient.
ROUNDING = {"none": 1e-6, "bf16": 2e-2, "fp16": 2e-3, "int8": 3e-2, "fp16+fp32": 2e-3, "int8+ef": 3e-2}


def _whole(rank: int, step: int) -> list[Tensor]:
    """Gradients of whole numbers, whose sums are exact."""
    return [grad.mul(8).round() for grad in random_grads(rank, step, SHAPES, torch.float32)]


def _weighted(everyone: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    sums = [sum(w * g.double() for w, g in zip(weights, same, strict=True)) for same in zip(*everyone, strict=True)]
    return [torch.as_tensor(each).float() for each in sums]


def _norm(grads: Sequence[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads]).norm()


def _assert_near(actual: Sequence[Tensor | None], expected: Sequence[Tensor], wire: str, what: str) -> None:
    largest = max(float(each.abs().max()) for each in expected)
    for got, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=ROUNDING[wire] * largest, msg=lambda m: f"{what}: {m}")


def _sums(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for view in (False, True) if wire == "none" else (False,):
            model = Given(_whole(0, 0))
            sync = fastsync.attach(model, wire, op="sum", bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=view)
            for step in range(3):
                everyone = [_whole(other, step) for other in range(world_size)]
                expected = _weighted(everyone, [1.0] * world_size)
                model.zero_grad(set_to_none=not view)
                model(everyone[rank]).backward()
                if wire == "none" and world_size != 3:
                    assert all(map(torch.equal, grads_of(model), expected)), f"step {step}"
                _assert_near(grads_of(model), expected, wire, f"{wire}, step {step}")
                assert_same_on_all_ranks(grads_of(model))
                norm = _norm([grad for grad in grads_of(model) if grad is not None])
                torch.testing.assert_close(sync.grad_stats.grad_norm, norm, rtol=1e-5, atol=0)
            sync.detach()


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, True), (4, False)])
def test_sums(world_size: int, shared_memory: bool) -> None:
    run_ranks(_sums, world_size, shared_memory=shared_memory)


def _weights(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for op in ("mean", "sum") if wire == "none" else ("mean",):
            model = Given(_whole(0, 0))
            sync = fastsync.attach(model, wire, op=op, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
            for step in range(6):
                everyone = [_whole(other, step) for other in range(world_size)]
                # First without, then numbers of tokens; at last one has none, and no gradients that mean anything.
                weights = [1.0 if step < 2 else 100.0 + 37 * step * other for other in range(world_size)]
                if step == 5:
                    weights[1] = 0.0
                if step >= 2:
                    sync.set_weight(weights[rank])
                sync.ride("rank", torch.tensor(float(rank)))
                mine = [grad * math.nan for grad in everyone[rank]] if weights[rank] == 0 else everyone[rank]
                model.zero_grad(set_to_none=step % 2 == 0)
                with sync.no_sync():
                    model([grad / 2 for grad in mine]).backward()
                model([grad / 2 for grad in mine]).backward()
                expected = _weighted(everyone, weights)
                if op == "mean":
                    expected = [each / sum(weights) for each in expected]
                what = f"{wire}, {op}, step {step}"
                _assert_near(grads_of(model), expected, wire, what)
                assert_same_on_all_ranks(grads_of(model))
                norm = _norm([grad for grad in grads_of(model) if grad is not None])
                torch.testing.assert_close(sync.grad_stats.grad_norm, norm, rtol=1e-5, atol=0, msg=what)
                assert sync.riders["rank"] == (world_size - 1) / 2
            sync.detach()


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, False)])
def test_weighted_means_and_sums(world_size: int, shared_memory: bool) -> None:
    run_ranks(_weights, world_size, shared_memory=shared_memory)


def _missing(rank: int, world_size: int) -> None:
    """Gradients of one rank alone are weighted too; one that nobody has stays None, and what it was otherwise."""
    model = Given(_whole(0, 0))
    sync = fastsync.attach(model, "int8+ef", bucket_cap_mb=SMALL_BUCKETS)
    sync.set_weight(1.0 + 2 * rank)
    for step in range(3):
        grads: list[Tensor | None] = list(_whole(0, step))
        grads[1] = None
        expected = [None if grad is None else grad * 0.25 for grad in grads]
        if rank == 1:
            grads[0] = None
            expected_here = [None if grad is None else grad for grad in grads]
            grads = expected_here
        model.zero_grad()
        model(grads).backward()
        first = model.weights[0].grad
        assert first is not None
        assert expected[0] is not None
        torch.testing.assert_close(first, expected[0], rtol=0, atol=0.05 * float(expected[0].abs().max()))
        assert model.weights[1].grad is None
    sync.set_weight(0)
    model.zero_grad()
    model(_whole(rank, 0)).backward()
    assert all(grad is not None and not grad.any() for grad in grads_of(model)), "nobody counts for anything"


def test_weights_of_missing_gradients() -> None:
    run_ranks(_missing, 2)


def _fails(rank: int, world_size: int) -> None:
    """What a rank that counts for nothing could not compute is none the less no sum."""
    model = Given(_whole(0, 0))
    sync = fastsync.attach(model, op="sum")
    sync.set_weight(rank)
    model(_whole(rank, 0)).backward()
    first, second, *_ = model.weights
    with pytest.raises(ArithmeticError) if rank == 0 else torch.enable_grad():
        ((Fails.apply(first) if rank == 0 else first).sum() + second.sum()).backward()
    if rank == 1:
        assert first.grad is not None
        assert first.grad.isnan().all()


def test_a_failure_counts_at_any_weight() -> None:
    run_ranks(_fails, 2)


def _refused(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    with pytest.raises(ValueError, match="op: expected 'mean' or 'sum', got 'avg'"):
        fastsync.attach(model, op="avg")
    sync = fastsync.attach(model)
    for weight in (-1.0, math.inf, math.nan, 10**400, None, "many"):
        with pytest.raises(ValueError, match="weight: expected a number that is 0 or more"):
            sync.set_weight(weight)
    other = Given([torch.ones(3)])
    with pytest.raises(ValueError, match=r"rank 0: op mean; rank 1: op sum"):
        fastsync.attach(other, op="sum" if rank else "mean")


def test_what_is_refused() -> None:
    run_ranks(_refused, 2)
