"""What goes along with the gradients: the weights of ranks, and what the caller piggybacks."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync import Compression
from fastsync.sync.compression import parse_compression
from tests import reference
from tests.engine.entry_points import whole_numbers
from tests.engine.same_data import same_data_is_meant
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks
from tests.refused import refused

# ---- weights, and sums in place of means -----------------------------------------------------------------------------


SHAPES = [(7, 33), (300,), (2, 3, 4), (250,)]


def _whole(rank: int, step: int) -> list[Tensor]:
    return whole_numbers(rank, step, SHAPES)


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


@on_ranks(3, cases={"shared_memory": [True, False]})
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


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (2, False), (3, False)])
@on_ranks(parametrized=("shared_memory",))
def test_sums_that_their_dtype_does_not_hold_are_counted(rank: int, world_size: int) -> None:
    """A sum that its own dtype does not hold saturates, and is counted on every rank."""
    same_data_is_meant()
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
    refused(lambda: fastsync.attach(model, op="avg"), "op:")
    sync = fastsync.attach(model)
    for weight in (-1.0, math.inf, math.nan, 10**400, None, "many"):
        refused(lambda: sync.set_weight(weight), "weight:")
    other = Given([torch.ones(3)])
    refused(lambda: fastsync.attach(other, op="sum" if rank else "mean"), "rank 0: op mean; rank 1: op sum")


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


# ---- piggybacked values ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_piggybacked_values_are_exact_means_and_change_no_gradient(rank: int, world_size: int) -> None:
    for wire in ("none", "bf16", "fp16"):
        model, alone = (Given(random_grads(0, 0, SHAPES, torch.float32)) for _ in range(2))
        sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
        reference = fastsync.attach(alone, wire, bucket_cap_mb=SMALL_BUCKETS)
        sent = []
        # Of other shapes from step to step, two of them none; the first takes the place of one before.
        for step, shapes in enumerate(([], [], [(5,)], [(), (3, 2)], [(4,), (3, 2)], [], [(1,)])):
            mine = random_grads(rank, step, SHAPES, torch.float32)
            values = [random_grads(100 + other, step, shapes, torch.float32) for other in range(world_size)]
            for index, value in enumerate(values[rank]):
                sync.piggyback(f"{index}", torch.zeros(7))
                sync.piggyback(f"{index}", value)
                value.fill_(100.0)  # too late
            values = [random_grads(100 + other, step, shapes, torch.float32) for other in range(world_size)]
            for each in (model, alone):
                each.zero_grad()
                each(mine).backward()
            assert_all_bitwise_equal(grads_of(model), grads_of(alone), f"{wire}: values beside it changed a gradient")
            assert torch.equal(sync.grad_stats().grad_norm, reference.grad_stats().grad_norm)
            means = [torch.stack(same).sum(dim=0) / world_size for same in zip(*values, strict=True)]
            assert sync.piggybacked().keys() == {f"{index}" for index in range(len(means))}
            assert_all_bitwise_equal(list(sync.piggybacked().values()), means, f"{wire}, step {step}")
            sent.append(sync.stats().wire_bytes)
        assert sync.stats().numel == reference.stats().numel
        assert sent[2] - sent[1] == sent[1] - sent[0] + 5 * 4, "of float32, whatever the wire"


@on_ranks(2)
def test_piggybacked_values_go_with_the_next_sync(rank: int, world_size: int) -> None:
    same_data_is_meant()
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    sync.piggyback("value", torch.tensor([float(rank)]))
    with sync.no_sync():
        model([torch.ones(3)]).backward()
    assert sync.piggybacked() == {}, "it went with a backward that was not synchronised"
    sync.synchronize()
    kept = sync.piggybacked()["value"]
    sync.piggyback("value", torch.tensor([8.0]))
    model([torch.ones(3)]).backward()
    assert kept.tolist() == [0.5], "a later sync wrote into what this one gave"
    assert sync.piggybacked()["value"].tolist() == [8.0]


@on_ranks(2)
def test_ranks_whose_piggybacked_values_differ_are_told(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    for wrong in (torch.ones(2, dtype=torch.float64), torch.tensor(1), 0.5):
        refused(lambda: sync.piggyback("kl", wrong), "tensor:")
    sync.piggyback("value", torch.ones(2 + rank))
    of_shape = "piggybacked value value of shape"
    with pytest.raises(ValueError, match=rf"rank 0: {of_shape} \[2\]; rank 1: {of_shape} \[3\]"):
        model([torch.ones(3)]).backward()
    sync.piggyback("value", torch.ones(2))
    model.zero_grad()
    model([torch.ones(3)]).backward()
    assert sync.piggybacked()["value"].tolist() == [1.0, 1.0]
    dist.barrier()


@on_ranks(2)
def test_a_piggybacked_value_that_some_ranks_leave_out_is_nan(rank: int, world_size: int) -> None:
    """In the second step rank 1 sends no a: rank 0, which asked for its mean, gets nan."""
    same_data_is_meant()
    for wire in ("none", "fp16"):
        model = Given([torch.ones(3)])
        sync = fastsync.attach(model, wire)
        for step, names in enumerate((["a", "b"], ["a", "b"] if rank == 0 else ["b"], ["a", "b"], [])):
            for name in names:
                sync.piggyback(name, torch.tensor([float(rank), 1.0]))
            model.zero_grad()
            model([torch.ones(3)]).backward()
            means = {name: value.tolist() for name, value in sync.piggybacked().items()}
            if step == 1 and rank == 0:
                assert all(math.isnan(value) for value in means.pop("a")), f"{wire}: {sync.piggybacked()}"
                names.remove("a")
            assert means == {key: [0.5, 1.0] for key in names}, f"{wire}, step {step}"
            assert grads_of(model)[0].tolist() == [1.0] * 3


@on_ranks(2, timeout=40.0)
def test_ranks_do_not_wait_for_each_other_inside_backward_where_a_setting_is_new(rank: int, world_size: int) -> None:
    """The gradients of two engines, each with a group of its own, get ready in other orders on the ranks."""
    same_data_is_meant()
    models = [Given([torch.ones(3)]) for _ in range(2)]
    syncs = [fastsync.attach(model, process_group=dist.new_group()) for model in models]
    for step in range(3):
        for sync in syncs:
            sync.piggyback(f"new in step {step}", torch.tensor(float(rank)))
            if step == 2:
                sync.compression = "fp16"  # which begins by finding its scale
        losses = [model([torch.ones(3)]) for model in (models if rank == 0 else reversed(models))]
        torch.stack(losses).sum().backward()
        assert [sync.piggybacked()[f"new in step {step}"].item() for sync in syncs] == [0.5, 0.5]


@on_ranks(2, timeout=40.0)
def test_a_failed_sync_leaves_gradients_as_they_were(rank: int, world_size: int) -> None:
    """A sync that fails leaves gradients as they were."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model, process_group=group, overlap=False)
    sync.set_weight(2.0 + rank)
    model.weights[0].grad = torch.ones(3)
    sync.synchronize()
    if rank == 0:
        model.weights[0].grad = torch.full((3,), 5.0)
        refused(lambda: sync.synchronize(), "rank 1", kind=RuntimeError)
        assert model.weights[0].grad.tolist() == [5.0] * 3
    dist.barrier()
