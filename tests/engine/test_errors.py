"""Errors carry data: which ranks, which step, and the reason."""

from __future__ import annotations

import os
import pickle
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.distributed import every_rank_calls, gloo_group
from fastsync.elastic.elastic import Elastic
from fastsync.elastic.members_store import STORE
from fastsync.elastic.membership import TooFewRanksError
from fastsync.errors import RankLostError, SyncError
from fastsync.ppo.exchange import Exchange, MissingRankError
from tests.ranks import on_ranks


@pytest.mark.parametrize("kind", [SyncError, RankLostError, TooFewRanksError, MissingRankError])
def test_the_data_of_an_error_travel_with_it(kind: type[SyncError]) -> None:
    error = pickle.loads(pickle.dumps(kind("fastsync: lost", ranks=[2, 0], step=3, bucket="head", reason="lost")))
    assert isinstance(error, RuntimeError)
    assert (type(error), str(error)) == (kind, "fastsync: lost")
    assert (error.ranks, error.rank, error.step, error.bucket, error.reason) == ((0, 2), None, 3, "head", "lost")


@pytest.mark.parametrize(("ranks", "rank"), [((), None), ((4,), 4), ((1, 2), None)])
def test_the_rank_is_that_of_an_error_about_one(ranks: tuple[int, ...], rank: int | None) -> None:
    assert SyncError("fastsync: lost", ranks=ranks).rank == rank


@on_ranks(2, lost=[1])
def test_too_few_ranks(rank: int, world_size: int, store_port: int) -> None:
    os.environ[STORE] = f"127.0.0.1:{store_port}"
    model = nn.Linear(2, 1)
    sync, optimizer = fastsync.attach(model), torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = Elastic(model, optimizer, sync, timeout=3, min_ranks=2)
    with pytest.raises(TooFewRanksError) as raised:  # noqa: PT012
        for step in elastic.steps(5):
            with step:
                if (rank, step.index) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    error = raised.value
    told = error.ranks, error.rank, error.step, error.reason
    assert told == ((0,), 0, 3, "1 of ranks [0, 1] are left, and min_ranks=2")


@on_ranks(2, lost=[1])
def test_a_rank_that_does_not_answer(rank: int, world_size: int) -> None:
    exchange = Exchange(torch.device("cpu"))
    exchange.all_gather([1.0])
    if rank == 1:
        time.sleep(0.5)  # so that rank 0 waits already
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(MissingRankError) as raised:
        exchange.all_gather([1.0])
    error = raised.value
    assert str(error).startswith(f"fastsync train: {error.reason} (")
    told = error.ranks, error.rank, error.reason
    assert told == ((1,), 1, "rank 0 of 2 waited for the others in vain, and ranks [1] do not answer")


def test_a_call_that_not_every_rank_has_made() -> None:
    group = gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=10), "alone")
    with pytest.raises(SyncError) as raised, every_rank_calls("sync_weights", group):
        raise RuntimeError("timed out")
    reason = "on rank 0 of 1 the other ranks did not all come in time, or one is lost (timed out)"
    assert raised.value.reason == reason
    assert str(raised.value).startswith(f"sync_weights: {reason}; ")
