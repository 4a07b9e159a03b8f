"""``Elastic``: ranks that are lost and ranks that join, and what the others then hold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

import fastsync
from fastsync.elastic.members_store import JOINS, STORE
from tests.engine import elastic
from tests.engine.elastic import NUM_STEPS, Moment, Training, begun, check, end_now, go_on
from tests.ranks import on_ranks, run_ranks


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compression", ["none", "int8+ef"])
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "between"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_end_as_without_a_loss(store: TCPStore, compression: str, place: str, victim: int) -> None:
    ran = run_ranks(go_on, 3, store.port, compression, {victim: (4, place)}, lost=[victim])
    left = [each for each in range(3) if each != victim]
    changes = check(ran, [0, 1, 2], compression)
    # A rank that dies in its optimizer has given its gradients, but its death may be noticed before they are taken.
    assert [(index, list(members)) for index, members in changes] in [[(4, left)], [(5 - (place != "optimizer"), left)]]


@pytest.mark.parametrize("lost", [{}, {1: (1, "backward")}], ids=["join", "a death while another joins"])
def test_a_new_rank_joins(store: TCPStore, lost: dict[int, Moment]) -> None:
    ran = run_ranks(go_on, 4, store.port, "none", lost, [3], lost=list(lost))
    changes = check(ran, [0, 1, 2], "none")
    assert list(changes[-1][1]) == [each for each in range(4) if each not in lost]


def save_a_checkpoint(rank: int, world_size: int, folder: str) -> None:
    training = Training(range(world_size), "int8+ef")
    for index in range(3):
        training.step(index)
    parts = {"model": training.model, "optimizer": training.optimizer, "scheduler": training.scheduler}
    states = {name: part.state_dict() for name, part in (parts | {"sync": training.sync}).items()}
    torch.save(states, f"{folder}/{rank}")


def resumed(folder: str, make: type[Training], *given: Any) -> Training:
    """Makes a training that goes on from this rank's checkpoint, if there is one."""
    training = make(*given)
    if os.path.exists(file := f"{folder}/{dist.get_rank()}"):
        for name, state in torch.load(file, weights_only=False).items():
            getattr(training, name).load_state_dict(state)
    return training


def with_checkpoint(rank: int, world_size: int, folder: str, fn: Callable[..., Any], *given: Any) -> Any:
    with patch.object(elastic, "Training", partial(resumed, folder, Training)):
        return fn(rank, world_size, *given)


def test_a_new_rank_joins_a_training_that_was_resumed(store: TCPStore, tmp_path: Path) -> None:
    run_ranks(save_a_checkpoint, 2, str(tmp_path))
    run = partial(run_ranks, with_checkpoint)
    ran = run(3, str(tmp_path), go_on, store.port, "int8+ef", {}, [2])
    changes = check(ran, [0, 1], "int8+ef", lambda fn, size, *given: run(size, str(tmp_path), fn, *given))
    assert list(changes[-1][1]) == [0, 1, 2]


@on_ranks(3)
def test_a_new_rank_with_another_model_ends_alone(rank: int, world_size: int, store_port: int) -> None:
    os.environ[STORE] = f"127.0.0.1:{store_port}"
    is_new = rank == 2
    if is_new:
        os.environ[JOINS] = "1"
    training = Training([2] if is_new else [0, 1])
    if is_new:
        training.sync.detach()
        training.model[-1] = nn.Linear(16, 4)
        training.optimizer = torch.optim.Adam(training.model.parameters())
        group = dist.new_group([2], use_local_synchronization=True)
        training.sync = fastsync.attach(training.model, bucket_cap_mb=0.0003, process_group=group)
    elastic = training.elastic()
    refusal = pytest.raises(ValueError, match="the ranks do not agree on what to synchronise: rank 0, 1: ")
    with refusal if is_new else nullcontext():
        for step in elastic.steps(NUM_STEPS):
            with step:
                training.step(step.index)
                while rank == 0 and step.index == 0 and not elastic._step.wants_change:
                    time.sleep(0.01)
    assert is_new or elastic.members == [0, 1]


def train_apart(rank: int, world_size: int, port: int) -> tuple[list[int], Tensor]:
    """Two pairs of ranks, each with a training of its own. Rank 3 dies."""
    os.environ[STORE] = f"127.0.0.1:{port}"
    training = Training([0, 1] if rank < 2 else [2, 3])
    elastic = training.elastic(timeout=20)
    for step in elastic.steps(NUM_STEPS):
        with step:
            if (rank, step.index) == (3, 2):
                end_now()
            training.step(step.index)
    return elastic.members, training.model[0].weight.detach()


def test_groups_of_ranks_train_apart(store: TCPStore) -> None:
    first, second, third, _ = run_ranks(train_apart, 4, store.port, lost=[3], timeout=60)
    assert [first[0], second[0], third[0]] == [[0, 1], [0, 1], [0]]
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], third[1])


@on_ranks(3, lost=[1], timeout=25)
def test_a_death_is_known_although_a_child_lives_on(rank: int, world_size: int, store_port: int) -> None:
    """A child that was forked, as a DataLoader forks workers, has all descriptors. The time-out is ten minutes."""
    training, elastic = begun(store_port, timeout=600)
    for step in elastic.steps(NUM_STEPS):
        with step:
            if (rank, step.index) == (1, 3):
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                end_now()
            training.step(step.index)
    assert elastic.members == [0, 2]
