"""Sums and weighted means over ranks: whose gradients count how much."""

from __future__ import annotations

import math
from datetime import timedelta

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
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]


def _whole(rank: int, step: int) -> list[Tensor]:
    """Gradients of whole numbers, whose sums are exact."""
    return [grad.mul(8).round() for grad in random_grads(rank, step, SHAPES, torch.float32)]


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_who_has_no_weight_counts_for_nothing(rank: int, world_size: int) -> None:
    """Whatever its gradients are. First nobody has asked for weights, then they are numbers of tokens."""
    for op in ("mean", "sum"):
        for wire in ("none", "int8+ef"):
            model = Given(_whole(0, 0))
            sync = fastsync.attach(model, parse_compression(wire), op=op, bucket_cap_mb=SMALL_BUCKETS)
            for step in range(6):
                everyone = [_whole(other, step) for other in range(world_size)]
                weights = [1.0 if step < 2 else 64.0 * (1 + step * other) for other in range(world_size)]
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
                total = sum(weights) if op == "mean" else 1.0
                expected = [
                    (sum(w * g.double() for w, g in zip(weights, same, strict=True)) / total).float()  # type: ignore[attr-defined]
                    for same in zip(*everyone, strict=True)
                ]
                largest = max(float(each.abs().max()) for each in expected)
                for got, right in zip(grads_of(model), expected, strict=True):
                    is_exact = wire == "none" and world_size == 2 and step < 2
                    atol = 0.0 if is_exact else (1e-6 if wire == "none" else 3e-2) * largest
                    torch.testing.assert_close(got, right, rtol=0, atol=atol)
                assert_same_on_all_ranks(grads_of(model))
                norm = torch.cat([grad.flatten() for grad in grads_of(model)]).norm()
                torch.testing.assert_close(sync.grad_stats().grad_norm, norm, rtol=1e-5, atol=0)
                assert sync.piggybacked()["rank"] == (world_size - 1) / 2
            for _ in range(2):  # the first brings what error feedback has kept
                sync.compression = "none"
                sync.set_weight(0)
                model.zero_grad()
                model(_whole(rank, 0)).backward()
            assert all(not grad.any() for grad in grads_of(model)), "nobody counts for anything"
            sync.detach()


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
