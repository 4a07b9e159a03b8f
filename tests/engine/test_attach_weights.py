"""Sums and weighted means over ranks: whose gradients count how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile

import fastsync
from fastsync import Compression
from fastsync.compression import parse_compression
from tests import reference
from tests.models import (
    SMALL_BUCKETS,
    Fails,
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

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


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, True), (4, False)])
@on_ranks(parametrized=("shared_memory",))
def test_sums(rank: int, world_size: int) -> None:
    for wire in WIRES:
        model = Given(_whole(0, 0))
        sync = fastsync.attach(model, parse_compression(wire), op="sum", bucket_cap_mb=SMALL_BUCKETS)
        for step in range(3):
            everyone = [_whole(other, step) for other in range(world_size)]
            expected = _weighted(everyone, [1.0] * world_size)
            model.zero_grad(set_to_none=step % 2 == 0)
            model(everyone[rank]).backward()
            if wire == "none" and world_size != 3:
                assert all(map(torch.equal, grads_of(model), expected)), f"step {step}"
            _assert_near(grads_of(model), expected, wire, f"{wire}, step {step}")
            assert_same_on_all_ranks(grads_of(model))
            norm = _norm([grad for grad in grads_of(model) if grad is not None])
            torch.testing.assert_close(sync.grad_stats().grad_norm, norm, rtol=1e-5, atol=0)
        sync.detach()


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_weighted_means_and_sums(rank: int, world_size: int) -> None:
    for wire in WIRES:
        for op in ("mean", "sum") if wire == "none" else ("mean",):
            model = Given(_whole(0, 0))
            sync = fastsync.attach(model, parse_compression(wire), op=op, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(6):
                everyone = [_whole(other, step) for other in range(world_size)]
                # First without, then numbers of tokens; at last one has none, and no gradients that mean anything.
                weights = [1.0 if step < 2 else 100.0 + 37 * step * other for other in range(world_size)]
                if step == 5:
                    weights[1] = 0.0
                if step >= 2:
                    sync.set_weight(weights[rank])
                sync.piggyback("rank", torch.tensor(float(rank)))
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
                torch.testing.assert_close(sync.grad_stats().grad_norm, norm, rtol=1e-5, atol=0, msg=what)
                assert sync.piggybacked()["rank"] == (world_size - 1) / 2
            sync.detach()


@on_ranks(2)
def test_weights_of_missing_gradients(rank: int, world_size: int) -> None:
    """Gradients of one rank alone are weighted too; one that nobody has stays None, and what it was otherwise."""
    model = Given(_whole(0, 0))
    sync = fastsync.attach(model, parse_compression("int8+ef"), bucket_cap_mb=SMALL_BUCKETS)
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
    sync.compression = "int8"
    for _ in range(2):  # the first brings what error feedback has kept
        sync.set_weight(0)
        model.zero_grad()
        model(_whole(rank, 0)).backward()
    assert all(grad is not None and not grad.any() for grad in grads_of(model)), "nobody counts for anything"


@on_ranks(2)
def test_a_failure_counts_at_any_weight(rank: int, world_size: int) -> None:
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


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(3, parametrized=("shared_memory",))
def test_weighted_means_are_the_references_to_the_bit(rank: int, world_size: int) -> None:
    """One multiplication and one rounding on the way to the wire, whatever the gradients' dtype and the weights."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for wire, wire_dtype in (("none", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
            for weights in ([1.0, 3.0, 2.5], [8192.0, 8192.0, 1e6], [3e38, 0.0, 1e38]):
                everyone = [random_grads(other, 7, SHAPES, dtype) for other in range(world_size)]
                expected = reference.all_reduce_mean(everyone, wire_dtype, reduce="fp32", weights=weights[:world_size])
                model = Given(everyone[rank])
                sync = fastsync.attach(model, Compression(wire, "fp32", algorithm="one_shot"), bucket_cap_mb=64)
                sync.set_weight(weights[rank])
                model(everyone[rank]).backward()
                # The order of the buckets' gradients is the backward's, and of fp16 they share a scale.
                assert_all_bitwise_equal(grads_of(model), expected, f"{dtype}, {wire}, {weights}: gradient")
                sync.detach()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@on_ranks(3)
def test_error_feedback_loses_nothing_where_weights_change(rank: int, world_size: int, algorithm: Any) -> None:
    """Whatever the weights do from step to step, even where nobody counts: what is kept is a part of the mean."""
    model = Given(_whole(0, 0))
    sync = fastsync.attach(model, Compression("int8", "fp32", error_feedback=True, algorithm=algorithm))
    applied, wanted = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    all_weights = ([1.0, 2.0, 3.0], [500.0, 1e6, 3.0], [0.0, 0.0, 0.0], [0.0, 1e-3, 1e-3], [1.0, 1.0, 1.0])
    for step, weights in enumerate(all_weights):
        everyone = [_whole(other, step) for other in range(world_size)]
        sync.set_weight(weights[rank])
        model.zero_grad()
        model(everyone[rank]).backward()
        if any(weights):
            for total, each in zip(wanted, _weighted(everyone, weights), strict=True):
                total += each.double() / sum(weights)
        residuals = sync.state_dict()["residuals"]
        for index, (total, grad) in enumerate(zip(applied, grads_of(model), strict=True)):
            total += grad.double()
            residual = residuals[f"weights.{index} of rank {rank}"]
            kept = residual["own"].double() / world_size
            if residual["of_sums"] is not None:
                kept = kept + residual["of_sums"].double()
            dist.all_reduce(kept)
            torch.testing.assert_close(total + kept.view_as(total), wanted[index], rtol=0, atol=1e-4)
    assert sum(float(residual["own"].abs().sum()) for residual in residuals.values()) > 0


@on_ranks(2, timeout=40.0)
def test_a_failed_sync_leaves_gradients_as_they_were(rank: int, world_size: int) -> None:
    """A sync that fails leaves gradients as they were."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model, process_group=group, overlap=False)
    sync.set_weight(2.0 + rank)
    model.weights[0].grad = torch.ones(3)
    sync.synchronize()
    if rank == 0:
        model.weights[0].grad = torch.full((3,), 5.0)
        with pytest.raises(RuntimeError, match="rank 1"):
            sync.synchronize()
        assert model.weights[0].grad.tolist() == [5.0] * 3
    dist.barrier()


@on_ranks(2)
def test_weights_take_one_call_a_step(rank: int, world_size: int) -> None:
    """One call of the process group's more, and only where somebody has asked for weights."""
    model = Given([torch.ones(300), torch.ones(300)])
    sync = fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS)
    for weight, number in ((None, 0), (2.0, 1)):
        if weight is not None:
            sync.set_weight(weight + rank)
        for _ in range(3):
            model.zero_grad()
            loss = model([torch.ones(300), torch.ones(300)])
            with profile() as profiler:
                loss.backward()
        assert len([event for event in profiler.events() if event.name.startswith("gloo:")]) == number
        assert [grad.tolist() for grad in grads_of(model)] == [[1.0] * 300] * 2


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_sums_have_the_range_that_means_have(rank: int, world_size: int) -> None:
    """What travels is single ranks' values, so the fp16 scale is the one that means have."""
    scales = []
    for op in ("mean", "sum"):
        model = Given(_whole(0, 0))
        sync = fastsync.attach(model, "fp16", op=op, bucket_cap_mb=SMALL_BUCKETS)
        for step in range(3):
            model.zero_grad()
            model(_whole(0, step)).backward()
        scales.append(sync.state_dict()["scales"])
        sync.detach()
    assert scales[0] == scales[1]


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (2, False), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_sums_that_their_dtype_does_not_hold_are_counted(rank: int, world_size: int) -> None:
    """A sum that its own dtype does not hold saturates, and is counted on every rank."""
    for wire in ("none", "fp16", "bf16"):
        model = Given([torch.ones(700, dtype=torch.float16)])
        sync = fastsync.attach(model, parse_compression(wire), op="sum")
        for step in range(2):
            mine = torch.full((700,), 100.0, dtype=torch.float16)
            mine[3:600:3] = -40000.0
            mine[601] = math.inf if rank == 0 and step == 1 else 1.0
            model.zero_grad(set_to_none=False)
            model([mine]).backward()
            (grad,) = grads_of(model)
            what = f"{wire}, step {step}"
            torch.testing.assert_close(grad[0::3][1:200], torch.full_like(grad[:199], -65504.0), rtol=0, atol=0)
            assert (grad[1] - 100.0 * world_size).abs() <= 1, what
            assert sync.grad_stats().num_saturated == 199, what
            assert sync.grad_stats().num_nonfinite == step, what
        sync.detach()


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
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


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_a_sum_that_was_kept_counts_once(rank: int, world_size: int) -> None:
    """Of a gradient from an earlier step, which no rank reaches now."""
    for wire in ("none", "fp16", "int8+ef"):
        model = Given(_whole(0, 0))
        sync = fastsync.attach(model, parse_compression(wire), op="sum", bucket_cap_mb=SMALL_BUCKETS)
        model(_whole(rank, 0)).backward()
        kept = [grad.clone() for grad in grads_of(model)]
        grads: list[Tensor | None] = list(_whole(rank, 1))
        grads[1] = grads[3] = None
        model(grads).backward()
        for index in (1, 3):
            assert torch.equal(grads_of(model)[index], kept[index]), "what was kept has changed"
        norm = _norm(grads_of(model))
        torch.testing.assert_close(sync.grad_stats().grad_norm, norm, rtol=1e-5, atol=0)
        assert sync.grad_stats().num_nonfinite == 0
        sync.detach()


@on_ranks(2)
def test_equal_weights_change_no_bit(rank: int, world_size: int) -> None:
    """1 / 98 * 2 * 49 is not 1."""
    for weight in (None, 49.0, 107.0):
        parameter = nn.Parameter(torch.zeros(100, dtype=torch.float64))
        sync = fastsync.attach([parameter], overlap=False)
        if weight is not None:
            sync.set_weight(weight)
        everyone = [torch.linspace(1, 2 + each, 100, dtype=torch.float64) for each in range(world_size)]
        parameter.grad = everyone[rank].clone()
        sync.synchronize()
        assert torch.equal(parameter.grad, sum(everyone) / world_size), weight
