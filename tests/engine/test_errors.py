"""Errors carry data: which ranks, which step, and the reason."""

from __future__ import annotations

import os
import pickle
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

import fastsync
from fastsync.distributed import every_rank_calls, gloo_group
from fastsync.elastic.elastic import STORE, Elastic, RankLostError
from fastsync.elastic.membership import TooFewRanksError
from fastsync.errors import SyncError
from fastsync.ppo.exchange import Exchange, MissingRankError
from tests.ranks import run_ranks


@pytest.mark.parametrize("kind", [SyncError, RankLostError, TooFewRanksError, MissingRankError])
def test_the_data_of_an_error_travel_with_it(kind: type[SyncError]) -> None:
    error = pickle.loads(pickle.dumps(kind("fastsync: lost", ranks=[2, 0], step=3, bucket="head", reason="lost")))
    assert isinstance(error, RuntimeError)
    assert (type(error), str(error)) == (kind, "fastsync: lost")
    assert (error.ranks, error.rank, error.step, error.bucket, error.reason) == ((0, 2), None, 3, "head", "lost")


@pytest.mark.parametrize(("ranks", "rank"), [((), None), ((4,), 4), ((1, 2), None)])
def test_the_rank_is_that_of_an_error_about_one(ranks: tuple[int, ...], rank: int | None) -> None:
    assert SyncError("fastsync: lost", ranks=ranks).rank == rank


def lose_rank_1(rank: int, world_size: int, port: int) -> tuple[Any, ...]:
    os.environ[STORE] = f"127.0.0.1:{port}"
    model = nn.Linear(2, 1)
    sync, optimizer = fastsync.attach(model), torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = Elastic(model, optimizer, sync, timeout=3, min_ranks=2)
    try:
        for step in elastic.steps(5):
            with step:
                if (rank, step.index) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    except TooFewRanksError as error:
        return error.ranks, error.rank, error.step, error.reason
    return ()


def test_too_few_ranks(store: TCPStore) -> None:
    told, _ = run_ranks(lose_rank_1, 2, store.port, lost=(1,))
    assert told == ((0,), 0, 3, "1 of ranks [0, 1] are left, and min_ranks=2")


def gather_without_rank_1(rank: int, world_size: int) -> tuple[Any, ...]:
    exchange = Exchange(torch.device("cpu"))
    exchange.all_gather([1.0])
    if rank == 1:
        time.sleep(0.5)  # so that rank 0 waits already
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(MissingRankError) as raised:
        exchange.all_gather([1.0])
    error = raised.value
    assert str(error).startswith(f"fastsync train: {error.reason} (")
    return error.ranks, error.rank, error.reason


def test_a_rank_that_does_not_answer() -> None:
    told, _ = run_ranks(gather_without_rank_1, 2, lost=(1,))
    assert told == ((1,), 1, "rank 0 of 2 waited for the others in vain, and ranks [1] do not answer")


def test_a_call_that_not_every_rank_has_made() -> None:
    group = gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=10), "alone")
    with pytest.raises(SyncError) as raised, every_rank_calls("sync_weights", group):
        raise RuntimeError("timed out")
    reason = "on rank 0 of 1 the other ranks did not all come in time, or one is lost (timed out)"
    assert raised.value.reason == reason
    assert str(raised.value).startswith(f"sync_weights: {reason}; ")
