"""Gradients that do not belong together are noticed: on every rank, with the rank that is out of step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.compression import AnyCompression
from tests.engine.failing_passes import FailingPass
from tests.models import SMALL_BUCKETS, Given, Mlp, assert_same_on_all_ranks, batch
from tests.ranks import on_ranks
from tests.refused import refused

ERROR_FEEDBACK = fastsync.Compression("int8", error_feedback=True)
HOOK_CHECKS_ONE_OF = 16


class _Training:
    def __init__(self, model: nn.Module, rank: int, **options: Any) -> None:
        self._model, self._rank, self._number = model, rank, count()
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)

    def backward(self) -> None:
        self._optimizer.zero_grad()
        self._model(batch(self._rank, next(self._number))).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self._optimizer.step()


def _error_of(call: Callable[[], object], within: int) -> str:
    """What ends a repeated call, at the latest after so many times."""

    def repeat() -> None:
        for _ in range(within):
            call()

    return refused(repeat, "gradients that do not belong together", kind=RuntimeError)


def _one_backward_more(training: _Training, is_odd: bool, within: int = 1) -> str:
    for _ in range(3):
        training.step()
    (training.backward if is_odd else training.step)()
    return _error_of(training.step, within)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(
    cases={
        "odd": [0, 1],
        "compression, options": [
            ("none", {}),
            ("bf16", {}),
            ("fp16", {"fused": True}),
            (ERROR_FEEDBACK, {"foreach": False}),
        ],
    }
)
def test_a_backward_more_on_one_rank(
    rank: int, world_size: int, odd: int, compression: AnyCompression, options: dict[str, Any]
) -> None:
    model = Mlp()
    fastsync.attach(model, compression, bucket_cap_mb=SMALL_BUCKETS)
    _assert_names(_one_backward_more(_Training(model, rank, **options), rank == odd), world_size, odd)


@pytest.mark.parametrize(
    ("world_size", "compression", "within"),
    [
        pytest.param(2, "none", 1, id="messages"),
        pytest.param(3, "int8", 1, id="room beside the gradients"),
        pytest.param(3, "none", HOOK_CHECKS_ONE_OF, id="in place"),
    ],
)
@on_ranks(shared_memory=False)
def test_a_backward_more_on_one_rank_with_the_hook(rank: int, world_size: int, compression: str, within: int) -> None:
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    fastsync.register_comm_hook(model, compression)
    error = _one_backward_more(_Training(model, rank), rank == 1, within)
    if within == 1:
        _assert_names(error, world_size, 1)
    else:  # the stamps of the first two steps came before
        assert re.search(r"rank 1: engine (\d+), 14 updates; rank 0, 2: engine \1, 15 updates", error)


def _assert_names(error: str, world_size: int, odd: int) -> None:
    others = ", ".join(str(rank) for rank in range(world_size) if rank != odd)
    assert re.search(rf"rank {odd}: engine (\d+), 0 updates; rank {others}: engine \1, 1 update\.", error), error


@on_ranks(2, shared_memory=False)
def test_twins_whose_backwards_come_in_another_order(rank: int, world_size: int) -> None:
    trainings = []
    for critic in (Mlp(), Mlp()):
        fastsync.attach(critic, "bf16")
        trainings.append(_Training(critic, rank))
    for training in trainings:
        training.step()  # the ranks agree
    error = _error_of(trainings[rank].step, within=1)
    first, second = re.search(r"rank 0: engine (\d+), 1 update; rank 1: engine (\d+), 1 update", error).groups()
    assert first != second


def _swap_and_restore(model: nn.Module) -> None:
    """What an evaluation with averaged weights does."""
    with torch.no_grad():
        for parameter in model.parameters():
            kept = parameter.clone()
            parameter.zero_()
            parameter.copy_(kept)


def _alone(rank: int, world_size: int) -> None:
    """More steps than a stamp can count; weights that rank 0 swaps for a while, also around a step that all skip."""
    model = Mlp()
    sync = fastsync.attach(model)
    training = _Training(model, rank)
    for number in range(280):
        if number % 5 == 0:
            with sync.no_sync():
                training.backward()
        (training.backward if number % 11 == 10 else training.step)()
        if rank == 0 and number % 7 == 0:
            _swap_and_restore(model)
    assert_same_on_all_ranks(list(model.parameters()))


def _two_models_share_a_state(rank: int, world_size: int) -> None:
    """Rank 0 alone has loaded a checkpoint into one of them, which DDP gives to all."""
    models = [Mlp(), Mlp()]
    if rank == 0:
        models[0].load_state_dict(models[1].state_dict())
    trainings = []
    for model in models:
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
        ddp.register_comm_hook(None, fastsync.fp16_compress_hook)
        trainings.append(_Training(ddp, rank))
    for _ in range(3):
        for training in trainings:
            training.backward()  # a step that a GradScaler skips
    for _ in range(3):
        for training in trainings:
            training.step()
    message = _error_of(trainings[rank].step, within=HOOK_CHECKS_ONE_OF)
    assert re.search(r"rank 0: engine \d+, \d+ updates?; rank 1: engine \d+, \d+ updates?", message)


@on_ranks(2, cases={"shared_memory": [True, False]})
def test_a_bucket_that_is_sent_again_has_its_stamp(rank: int, world_size: int) -> None:
    model = Given([torch.ones(30)])
    sync = fastsync.attach(model, "bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pack = FailingPass("pack")
    fails = False
    model.weights[0].register_hook(lambda _: pack.set_failing(fails))  # just before the engine sends the gradient
    for step in range(4):
        fails = rank == 1 and step == 2
        loss = model([torch.ones(30) + rank])
        with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
            loss.backward()
        pack.set_failing(False)
        sync.abandon_step()
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, shared_memory=False)
def test_what_ranks_may_do_alone(rank: int, world_size: int) -> None:
    _alone(rank, world_size)
    _two_models_share_a_state(rank, world_size)
