"""What rides along with the gradients: exact means, at any compression, without a collective of its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    assert_same_on_all_ranks,
    grads_of,
    group_of_one,
    random_grads,
)
from tests.ranks import on_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4)]


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(dim=0) / len(values)


@on_ranks(2)
def test_riders_are_exact_means_and_change_no_gradient(rank: int, world_size: int) -> None:
    for wire in ("none", "bf16", "fp16"):
        for dtype in (torch.float32, torch.bfloat16):
            model, alone = (Given(random_grads(0, 0, SHAPES, dtype)) for _ in range(2))
            sync = fastsync.attach(model, wire, bucket_cap_mb=SMALL_BUCKETS)
            reference = fastsync.attach(alone, wire, bucket_cap_mb=SMALL_BUCKETS)
            assert sync.piggybacked() == {}
            for step in range(4):
                mine = random_grads(rank, step, SHAPES, dtype)
                alone.zero_grad()
                alone(mine).backward()
                values = [random_grads(100 + other, step, [(), (3, 2)], torch.float32) for other in range(world_size)]
                if step != 2:
                    sync.piggyback("kl", values[rank][0])
                    sync.piggyback("metrics", torch.zeros(5))
                    sync.piggyback("metrics", values[rank][1])  # takes the place of the one before
                model.zero_grad()
                model(mine).backward()
                assert_all_bitwise_equal(grads_of(model), grads_of(alone), f"{wire}: riders changed a gradient")
                assert torch.equal(sync.grad_stats().grad_norm, reference.grad_stats().grad_norm)
                if step == 2:
                    assert sync.piggybacked() == {}, "riders of an earlier sync"
                    continue
                assert set(sync.piggybacked()) == {"kl", "metrics"}
                assert torch.equal(sync.piggybacked()["kl"], _mean([value[0] for value in values]))
                assert torch.equal(sync.piggybacked()["metrics"], _mean([value[1] for value in values]))
                assert_same_on_all_ranks(list(sync.piggybacked().values()))
            assert sync.stats().numel == reference.stats().numel


@on_ranks(2)
def test_riders_go_with_the_next_sync(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    value = torch.tensor([float(rank)])
    sync.piggyback("value", value)
    value.fill_(100.0)  # too late
    with sync.no_sync():
        model([torch.ones(3)]).backward()
    assert sync.piggybacked() == {}, "it went with a backward that was not synchronised"
    sync.synchronize()
    assert sync.piggybacked()["value"].tolist() == [0.5]
    kept = sync.piggybacked()["value"]
    sync.piggyback("value", torch.tensor([8.0]))
    model([torch.ones(3)]).backward()
    assert kept.tolist() == [0.5], "a later sync wrote into what this one gave"
    assert sync.piggybacked()["value"].tolist() == [8.0]

    # A stop flag: all ranks leave the loop at the same step, which only one of them asked for.
    steps = 0
    while True:
        sync.piggyback("stop", torch.tensor(float(rank == 1 and steps == 2)))
        model([torch.ones(3)]).backward()
        steps += 1
        if sync.piggybacked()["stop"] > 0:
            break
    assert steps == 3


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(shared_memory=False)
def test_riders_share_the_collective_where_the_wire_is_float32(rank: int, world_size: int) -> None:
    # At full width two ranks send each other one message, which holds all; else all_reduce adds.
    for wire, name, number in (
        ("none", "gloo:send", 1 if world_size == 2 else 0),
        ("none", "gloo:all_reduce", 0 if world_size == 2 else 1),
        ("fp16", "gloo:all_reduce", 2),
    ):
        model = Given([torch.ones(3)])
        sync = fastsync.attach(model, wire)
        for _ in range(2):
            sync.piggyback("value", torch.ones(2))
            loss = model([torch.ones(3)])
            with profile() as profiler:
                loss.backward()
        assert len([event for event in profiler.events() if event.name == name]) == number


@on_ranks(2)
def test_riders_count_as_sent_in_the_wires_collective_and_in_one_of_their_own(rank: int, world_size: int) -> None:
    for wire in ("none", "fp16"):
        model = Given([torch.ones(3)])
        sync = fastsync.attach(model, wire)
        sent = []
        for step in range(3):
            if step == 2:
                sync.piggyback("value", torch.ones(5))
            model([torch.ones(3)]).backward()
            sent.append(sync.stats().wire_bytes)
        assert sent[2] - sent[1] == sent[1] - sent[0] + 5 * 4


@on_ranks(2)
def test_ranks_whose_riders_differ_are_told(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    sync.piggyback("value", torch.ones(2 + rank))
    with pytest.raises(
        ValueError,
        match=r"rank 0: piggybacked value value of shape \[2\]; rank 1: piggybacked value value of shape \[3\]",
    ):
        model([torch.ones(3)]).backward()
    sync.piggyback("value", torch.ones(2))
    model.zero_grad()
    model([torch.ones(3)]).backward()
    assert sync.piggybacked()["value"].tolist() == [1.0, 1.0]
    dist.barrier()


@on_ranks(2)
def test_a_rider_that_some_ranks_leave_out_is_nan(rank: int, world_size: int) -> None:
    """In the second step rank 1 sends no a: rank 0, which asked for its mean, gets nan."""
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


@on_ranks(2)
def test_a_rider_may_come_with_another_shape(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    for shape in ((3,), (2, 2), (1,)):
        sync.piggyback("before", torch.full(shape, float(rank)))
        sync.piggyback("last", torch.tensor(2.0 * rank))
        model([torch.ones(3)]).backward()
        assert torch.equal(sync.piggybacked()["before"], torch.full(shape, 0.5))
        assert sync.piggybacked()["last"].item() == 1.0


@on_ranks(2, timeout=40.0)
def test_ranks_do_not_wait_for_each_other_inside_backward_where_a_rider_is_new(rank: int, world_size: int) -> None:
    """The gradients of two engines, each with a group of its own, get ready in other orders on the ranks."""
    models = [Given([torch.ones(3)]) for _ in range(2)]
    syncs = [fastsync.attach(model, process_group=dist.new_group()) for model in models]
    for step in range(2):
        for sync in syncs:
            sync.piggyback(f"new in step {step}", torch.tensor(float(rank)))
        losses = [model([torch.ones(3)]) for model in (models if rank == 0 else reversed(models))]
        torch.stack(losses).sum().backward()
        assert [sync.piggybacked()[f"new in step {step}"].item() for sync in syncs] == [0.5, 0.5]


@pytest.mark.parametrize("wrong", [torch.ones(2, dtype=torch.float64), torch.tensor(1), 0.5])
def test_what_is_not_float32_is_refused(wrong: object) -> None:
    with group_of_one():
        sync = fastsync.attach(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"tensor: 'kl' has to be a float32 tensor, got .*; use tensor\.float\(\)"):
            sync.piggyback("kl", wrong)
