"""Schedules: another compression from some step on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from fastsync.compression import AnyCompression, as_compression
from tests.models import SMALL_BUCKETS, Mlp, assert_all_bitwise_equal, assert_same_on_all_ranks, batch, grads_of
from tests.ranks import on_ranks, run_ranks

PHASES: dict[int, AnyCompression] = {
    0: "none",
    2: "fp16",
    4: Compression("int8", error_feedback=True),
    7: Compression("bf16", reduce="fp32", algorithm="two_shot"),
}
NUM_STEPS = 9


def hooked(model: nn.Module, compression: AnyCompression) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    return ddp, fastsync.register_comm_hook(ddp, compression)


def attached(model: nn.Module, compression: AnyCompression) -> tuple[nn.Module, Any]:
    return model, fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)


EntryPoint = Callable[[nn.Module, AnyCompression], tuple[nn.Module, Any]]
ENTRY_POINTS = {"hook": hooked, "attach": attached}


def new_model() -> Mlp:
    torch.manual_seed(1)
    return Mlp()


def step(model: nn.Module, rank: int, number: int) -> list[Tensor]:
    model.zero_grad()
    model(batch(rank, number)).square().mean().backward()
    return [grad.clone() for grad in grads_of(model)]


def _changes_by_itself_as_by_hand(entry_point: EntryPoint, rank: int) -> None:
    scheduled, by_itself = entry_point(new_model(), fastsync.Schedule(PHASES))
    other, by_hand = entry_point(new_model(), PHASES[0])
    assert by_itself.compression == fastsync.Schedule(PHASES)
    for number in range(NUM_STEPS):
        if number in PHASES:
            by_hand.compression = PHASES[number]
        grads = step(scheduled, rank, number)
        assert_all_bitwise_equal(grads, step(other, rank, number), f"step {number}: gradient")
        assert_same_on_all_ranks(grads)
        assert by_itself.stats().wire_bytes == by_hand.stats().wire_bytes, f"step {number}"


def _takes_less_of_the_wire_from_its_step_on(entry_point: EntryPoint, rank: int) -> None:
    model, sync = entry_point(new_model(), fastsync.Schedule({0: "none", 3: "fp16"}))
    sent = [0]
    for number in range(6):
        step(model, rank, number)
        sent.append(sync.stats().wire_bytes)
    per_step = [after - before for before, after in pairwise(sent)]
    # What travels beside the gradients is float32 in any case.
    assert per_step[1] == per_step[2]
    assert per_step[4] == per_step[5] < 0.6 * per_step[2]


@pytest.mark.parametrize("name", ENTRY_POINTS)
@on_ranks(2, shared_memory=False)
def test_it_changes_by_itself_as_if_it_were_set_by_hand(rank: int, world_size: int, name: str) -> None:
    _changes_by_itself_as_by_hand(ENTRY_POINTS[name], rank)
    _takes_less_of_the_wire_from_its_step_on(ENTRY_POINTS[name], rank)


def _interrupted(rank: int, world_size: int, name: str) -> dict[int, tuple[Any, list[list[Tensor]]]]:
    """The state when so many steps were done, and the gradients of those that followed."""
    saved = {}
    model, sync = ENTRY_POINTS[name](new_model(), fastsync.Schedule(PHASES))
    grads = []
    for number in range(NUM_STEPS):
        if number in (1, 3, 6):
            saved[number] = copy.deepcopy(sync.state_dict())
        grads.append(step(model, rank, number))
    return {number: (state, grads[number:]) for number, state in saved.items()}


def _resumed(rank: int, world_size: int, name: str, saved_by_rank: list[dict[int, Any]]) -> None:
    for first, (state, expected) in saved_by_rank[rank].items():
        model, sync = ENTRY_POINTS[name](new_model(), fastsync.Schedule(PHASES))
        sync.load_state_dict(state)
        for number, grads in enumerate(expected, start=first):
            assert_all_bitwise_equal(step(model, rank, number), grads, f"resumed at {first}, step {number}")


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_resumed_run_goes_on_where_it_was(name: str) -> None:
    run_ranks(_resumed, 2, name, run_ranks(_interrupted, 2, name))


def test_a_schedule_holds_what_names_stand_for() -> None:
    schedule = fastsync.Schedule({0: "none", 10: "auto", 1000: fastsync.Compression("fp16")})
    fp16 = fastsync.Compression("fp16")
    assert schedule.phases == ((0, fastsync.Compression()), (10, fastsync.Auto()), (1000, fp16))
    assert as_compression(schedule) is schedule
    assert hash(schedule) == hash(fastsync.Schedule({0: "none", 10: "auto", 1000: "fp16"}))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, r"has to say what begins at step 0, got steps \[\]"),
        ({1: "none"}, r"has to say what begins at step 0, got steps \[1\]"),
        ({0: "none", 20: "fp16", 10: "bf16"}, r"have to ascend, got \[0, 20, 10\]"),
        ({0: "none", -1: "fp16"}, r"have to ascend, got \[0, -1\]"),
        ({0: "none", 1.5: "fp16"}, r"have to be whole numbers, got \[0, 1\.5\]"),
        ({False: "none"}, r"have to be whole numbers, got \[False\]"),
        ({0: "none", 5: "fp8"}, "expected one of 'none', .*, got 'fp8'"),
        ({0: fastsync.Schedule({0: "none"})}, "expected a Compression or an Auto from step 0 on, got Schedule"),
    ],
)
def test_a_mapping_that_is_no_schedule_is_refused(mapping: dict[int, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^compression: .*{message}"):
        fastsync.Schedule(mapping)


@on_ranks(2, timeout=60)
def test_ranks_do_not_wait_for_each_other_inside_a_backward_when_fp16_begins(rank: int, world_size: int) -> None:
    """The gradients of two engines, each on a group of its own, get ready in opposite orders on the two ranks."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    parameters = [nn.Parameter(torch.ones(1000)) for _ in groups]
    for parameter, group in zip(parameters, groups, strict=True):
        fastsync.attach([parameter], fastsync.Schedule({0: "none", 2: "fp16"}), process_group=group)
    for _ in range(4):
        loss = torch.zeros(())
        for parameter in parameters if rank == 0 else reversed(parameters):
            parameter.grad = None
            loss = loss + (parameter * (rank + 1)).sum()
        loss.backward()
        for parameter in parameters:
            assert parameter.grad is not None
            assert (parameter.grad == 1.5).all()
