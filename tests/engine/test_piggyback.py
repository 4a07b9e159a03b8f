"""What rides along with the gradients: exact means, at any compression, without a collective of its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

import fastsync
from tests.models import (
    SMALL_BUCKETS,
    Given,
    assert_all_bitwise_equal,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

SHAPES = [(7, 33), (300,), (2, 3, 4)]


@on_ranks(2)
def test_riders_are_exact_means_and_change_no_gradient(rank: int, world_size: int) -> None:
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
            assert_all_bitwise_equal(grads_of(model), grads_of(alone), f"{wire}: riders changed a gradient")
            assert torch.equal(sync.grad_stats().grad_norm, reference.grad_stats().grad_norm)
            means = [torch.stack(same).sum(dim=0) / world_size for same in zip(*values, strict=True)]
            assert sync.piggybacked().keys() == {f"{index}" for index in range(len(means))}
            assert_all_bitwise_equal(list(sync.piggybacked().values()), means, f"{wire}, step {step}")
            sent.append(sync.stats().wire_bytes)
        assert sync.stats().numel == reference.stats().numel
        assert sent[2] - sent[1] == sent[1] - sent[0] + 5 * 4, "of float32, whatever the wire"


@on_ranks(2)
def test_riders_go_with_the_next_sync(rank: int, world_size: int) -> None:
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
def test_ranks_whose_riders_differ_are_told(rank: int, world_size: int) -> None:
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    for wrong in (torch.ones(2, dtype=torch.float64), torch.tensor(1), 0.5):
        with pytest.raises(ValueError, match=r"tensor: 'kl' has to be a float32 tensor, got .*; use tensor\.float\(\)"):
            sync.piggyback("kl", wrong)
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
