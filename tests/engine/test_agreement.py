"""Ranks that mean different things are told so, all of them; ranks whose peer is gone or stuck do not wait for ever."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import fastsync
from tests.models import Given, backward_of, given_ddp, random_grads
from tests.ranks import on_ranks

SHAPES = [(300,), (200,), (400,)]
DISAGREE = "fastsync: the ranks do not agree on what to synchronise: "


@on_ranks(3)
def test_saved_scales_that_differ_are_told_with_who_has_what(rank: int, world_size: int) -> None:
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
    for _ in range(3):
        backward_of(ddp, grads)
    hook.load_state_dict(states[rank])  # in the middle of training
    with pytest.raises(ValueError, match=DISAGREE + "rank 2: saved scales of 3 parameters"):
        backward_of(ddp, grads)


@on_ranks(2, timeout=30.0)
def test_ranks_agree_on_a_number_where_one_has_made_more_engines_before(rank: int, world_size: int) -> None:
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
