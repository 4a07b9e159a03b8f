"""Ranks that mean different things are told so, all of them; ranks whose peer is gone or stuck do not wait for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import Given, assert_all_bitwise_equal, backward_of, given_ddp, grads_of, random_grads
from tests.ranks import RankError, run_ranks

SHAPES = [(300,), (200,), (400,)]
DISAGREE = "fastsync: the ranks do not agree on what to synchronise: "
TIMEOUT = timedelta(seconds=6)


def _assert_refused(ddp: DistributedDataParallel, grads: list[Tensor], difference: str) -> None:
    with pytest.raises(ValueError, match=re.escape(DISAGREE + difference + ". Nothing of this bucket was sent")):
        backward_of(ddp, grads)
    # The error comes before DDP has copied anything back: each rank is left with its own gradients.
    assert_all_bitwise_equal(grads_of(ddp), grads[-len(grads_of(ddp)) :], "gradient")


def _different_settings(rank: int, world_size: int) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    odd = rank == 1

    ddp = given_ddp(grads)
    fastsync.register_comm_hook(ddp, "none" if odd else "fp16")
    _assert_refused(ddp, grads, "rank 0, 2: compression fp16; rank 1: compression none")

    ddp = given_ddp(grads)
    ddp.register_comm_hook(None, fastsync.allreduce_hook if odd else fastsync.bf16_compress_hook)
    _assert_refused(ddp, grads, "rank 0, 2: compression bf16; rank 1: compression none")

    ddp = given_ddp(grads, find_unused_parameters=True, bucket_cap_mb=2.0**-20 if odd else 25)
    fastsync.register_comm_hook(ddp)
    one, all_three = "bucket 0 with 400 elements of Float", "bucket 0 with 900 elements of Float"
    _assert_refused(ddp, grads, f"rank 1: {one}; rank 0, 2: {all_three}")


def _different_scales(rank: int, world_size: int) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    names = [f"weights.{index}" for index in range(3)]
    states = [{"scales": dict.fromkeys(names, scale)} for scale in (8.0, 8.0, 4.0)]

    for number, state in enumerate((states[rank], {"scales": {}} if rank == 2 else states[0])):
        ddp = given_ddp(grads)
        hook = fastsync.register_comm_hook(ddp, "fp16")
        hook.load_state_dict(state)
        with pytest.raises(ValueError, match=DISAGREE) as info:
            backward_of(ddp, grads)
        ranks = re.findall(r"rank ([\d, ]+): saved scales of (\d) parameters", str(info.value))
        assert sorted(ranks) == [("0, 1", "3"), ("2", "30"[number])]

    ddp = given_ddp(grads)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    if rank != 1:
        hook.load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"rank 1: no saved scales; rank 0, 2: saved scales of 3 parameters"):
        backward_of(ddp, grads)

    ddp = given_ddp(grads)
    hook = fastsync.register_comm_hook(ddp, "fp16")
    for _ in range(3):
        backward_of(ddp, grads)
    hook.load_state_dict(states[rank])  # in the middle of training
    with pytest.raises(ValueError, match=DISAGREE + "rank 2: saved scales of 3 parameters"):
        backward_of(ddp, grads)


def _different_swaps(rank: int, world_size: int) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    for wires, difference in (
        (["fp16", "bf16", "fp16"], "rank 1: compression bf16; rank 0, 2: compression fp16"),
        (["fp16", "none", "fp16"], "rank 0, 2: compression fp16; rank 1: compression none"),
        (["none", "fp16", "bf16"], "rank 2: compression bf16; rank 1: compression fp16; rank 0: compression none"),
    ):
        # One that assigns what it had is to find out that the others did not.
        group = dist.new_group(timeout=TIMEOUT)
        ddp = given_ddp(grads, process_group=group)
        hook = fastsync.register_comm_hook(ddp)
        for _ in range(3):
            backward_of(ddp, grads)
        hook.compression = wires[rank]
        _assert_refused(ddp, grads, difference)


def _ranks_disagree(rank: int, world_size: int) -> None:
    _different_settings(rank, world_size)
    _different_scales(rank, world_size)
    _different_swaps(rank, world_size)


def test_ranks_that_differ_all_raise_and_say_which_rank_has_what() -> None:
    run_ranks(_ranks_disagree, 3)


def _after_an_engine_alone(rank: int, world_size: int) -> None:
    groups = [dist.new_group([other]) for other in range(world_size)]
    alone, model = Given([torch.ones(3)]), Given([torch.ones(3)])
    if rank == 1:
        fastsync.attach(alone, process_group=groups[rank])
        alone([torch.ones(3)]).backward()
    fastsync.attach(model)
    for step in range(3):
        model.zero_grad()
        model([torch.full((3,), float(step + 2 * rank))]).backward()
        assert model.weights[0].grad.tolist() == [step + 1.0] * 3


def test_ranks_agree_on_a_number_where_one_has_made_more_engines_before() -> None:
    run_ranks(_after_an_engine_alone, 2, timeout=30.0)


def _fails_within_the_timeout(ddp: DistributedDataParallel, grads: list[Tensor], match: str) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=match):
        backward_of(ddp, grads)
    assert time.monotonic() - start < 10 * TIMEOUT.total_seconds()


def _a_peer_gets_stuck(rank: int, group: dist.ProcessGroup, num_good_steps: int) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    ddp = given_ddp(grads, process_group=group)
    fastsync.register_comm_hook(ddp, "fp16")
    for _ in range(num_good_steps):
        backward_of(ddp, grads)
    if rank == 0:
        _fails_within_the_timeout(ddp, grads, r"bucket 0 failed on rank 0 of 2: .*([Tt]imed out|time-out|has left)")
    else:
        ddp(grads)  # DDP may rebuild its buckets here, together; rank 1 then never comes to its backward


def _only_one_swaps(rank: int, group: dist.ProcessGroup) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    ddp = given_ddp(grads, process_group=group)
    hook = fastsync.register_comm_hook(ddp)
    for _ in range(3):
        backward_of(ddp, grads)
    if rank == 0:
        hook.compression = "fp16"
    _fails_within_the_timeout(ddp, grads, f"bucket 0 failed on rank {rank} of 2: ")


# In the first sync, in that after DDP rebuilt its buckets, in an ordinary one.
GOOD_STEPS = [0, 1, 3]


def _nobody_hangs(rank: int, world_size: int) -> None:
    """Each case has two ranks of its own, so that all of them wait at the same time."""
    groups = [dist.new_group([first, first + 1], timeout=TIMEOUT) for first in range(0, world_size, 2)]
    case, rank_in_group = divmod(rank, 2)
    if case < len(GOOD_STEPS):
        _a_peer_gets_stuck(rank_in_group, groups[case], GOOD_STEPS[case])
    else:
        _only_one_swaps(rank_in_group, groups[case])
    dist.barrier()  # until then a stuck rank lives


def test_a_peer_that_does_not_come_is_an_error_within_the_timeout() -> None:
    run_ranks(_nobody_hangs, 2 * len(GOOD_STEPS) + 2)


def _kill_this_process(grad: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_in_backward(rank: int, world_size: int, folder: str) -> None:
    grads = random_grads(rank, 0, SHAPES, torch.float32)
    ddp = given_ddp(grads)
    fastsync.register_comm_hook(ddp, "bf16")
    for _ in range(3):
        backward_of(ddp, grads)
    if rank == 1:
        ddp.module.weights[1].register_hook(_kill_this_process)
    try:
        backward_of(ddp, grads)
    except RuntimeError as error:
        Path(folder, "error").write_text(str(error))


def test_a_peer_that_dies_in_backward_is_an_error_with_bucket_and_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed first\nrank 1:\ndied of SIGKILL"):
        run_ranks(_dies_in_backward, 2, str(tmp_path))
    assert re.search("fastsync: averaging bucket 0 failed on rank 0 of 2: .", Path(tmp_path, "error").read_text())
