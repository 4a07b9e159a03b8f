"""``Elastic``: what is refused, and loops over its steps that go wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed import TCPStore
from torch.optim import SGD, AdamW, Optimizer

import fastsync
from fastsync.elastic.elastic import Elastic
from fastsync.elastic.members_store import STORE
from fastsync.errors import RankLostError
from tests.engine.elastic import Training, as_if_lost
from tests.engine.wrappers import OptimizerWrapper
from tests.ranks import on_ranks
from tests.refused import refused


def test_arguments_that_are_refused(alone: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, sync, first = alone.model, alone.optimizer, alone.sync, next(alone.model.parameters())
    given: list[tuple[str, tuple[Any, Any, Any], dict[str, Any]]] = [
        ("sync", (model, optimizer, model), {}),
        ("optimizer", (model, [[optimizer]], sync), {}),
        ("optimizer", (model, SGD([first], lr=0.1), sync), {}),
        ("state", (model, optimizer, sync), {"state": [3]}),
        ("state", (model, optimizer, sync), {"state": alone.scheduler}),
        ("state", (model, optimizer, sync), {"state": [SGD(model.parameters())]}),
        ("model", (model.parameters(), optimizer, sync), {}),
        ("model", (nn.Linear(2, 2), optimizer, sync), {}),
        ("min_ranks", (model, optimizer, sync), {"min_ranks": 2}),
        ("min_ranks", (model, optimizer, sync), {"min_ranks": 0}),
        ("max_ranks", (model, optimizer, sync), {"min_ranks": 3, "max_ranks": 2}),
        ("timeout", (model, optimizer, sync), {"timeout": 0}),
    ]
    for argument, positional, options in given:
        with pytest.raises(ValueError) as error:
            Elastic(*positional, **options)
        assert str(error.value).startswith(argument), error
    with patch.object(sync, "_optimizer_shards", object()), pytest.raises(ValueError, match=r"^sync: with shard_opt"):
        Elastic(model, optimizer, sync)
    elastic = Elastic(model, optimizer, sync)
    refused(lambda: fastsync.shard_optimizer(sync, AdamW(model.parameters()), parameter_compression="bf16"), "sync:")
    del elastic
    monkeypatch.delenv(STORE)
    refused(lambda: Elastic(model, optimizer, sync), "store:")


def test_a_store_that_does_not_answer_is_named(alone: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsync.elastic.members_store.STORE_LIMIT", timedelta(seconds=1))
    for place, error in (("localhost", ValueError), ("127.0.0.1:1", RuntimeError)):
        monkeypatch.setenv(STORE, place)
        with pytest.raises(error) as raised:
            alone.elastic()
        assert place in str(raised.value)


@on_ranks(2)
def test_ranks_that_give_other_states_are_refused(rank: int, world_size: int, store_port: int) -> None:
    training, store = Training(range(world_size)), TCPStore("127.0.0.1", store_port, is_master=False)
    refused(lambda: training.elastic(*[GradScaler("cpu")] * rank, store=store), "object 2")


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], ["scheduler"], ["scheduler", "scaler", "optimizer"]])
def test_what_steps_and_was_not_given_is_refused(alone: Training, given: list[str]) -> None:
    parts = {"scheduler": alone.scheduler, "scaler": GradScaler("cpu")}
    before = alone.model[0].weight.detach().clone()
    state = [parts[each] for each in given if each in parts]
    steps = Elastic(alone.model, alone.optimizer, alone.sync, state=state).steps(1)
    other = SGD(alone.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="was not given"), next(steps):  # noqa: PT012
        parts["scaler"].scale(alone.model(torch.ones(4, 6)).square().sum()).backward()
        parts["scaler"].step(other if "optimizer" in given else alone.optimizer)
    assert torch.equal(alone.model[0].weight, before)


def test_join_is_refused_until_the_steps_have_ended(alone: Training) -> None:
    given = [alone.optimizer, alone.scheduler]
    with alone.sync.join(*given), pytest.raises(RuntimeError):
        alone.elastic()
    elastic = alone.elastic()
    with pytest.raises(RuntimeError):
        alone.sync.join(*given).__enter__()
    for step in elastic.steps(1):
        with step:
            alone.step(step.index)
    with alone.sync.join(*given):
        alone.step(1)


def test_a_step_of_several_optimizers_is_taken_as_one(alone: Training) -> None:
    """Each may step once. What fails between two of them could not be taken back, so it leaves the block."""
    first, *others = alone.model.parameters()
    optimizers = [SGD([first], lr=0.1), SGD(others, lr=0.1)]
    steps = Elastic(alone.model, optimizers, alone.sync).steps(3)

    def step(*order: int) -> None:
        with next(steps):
            alone.model(torch.ones(4, 6)).square().mean().backward()
            for index in order:
                optimizers[index].step()
            if len(order) == 1:
                raise as_if_lost()

    step(1, 0)
    with pytest.raises(RankLostError):
        step(0)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, OptimizerWrapper], ids=["torch's", "wrapped"])
def test_optimizer_steps_that_are_refused(alone: Training, wrap: Callable[[Optimizer], Optimizer]) -> None:
    """A second one, one without a sync, and one behind the block, which would run fine until a rank is lost."""
    steps = Elastic(alone.model, wrap(alone.optimizer), alone.sync, state=[alone.scheduler]).steps(2)
    with next(steps):
        refused(alone.optimizer.step, "no backward of this block has averaged")
        alone.step(0)
        refused(lambda: alone.step(0), "steps twice in one step")
    with next(steps):
        alone.model(torch.ones(4, 6)).sum().backward()
    refused(lambda: alone.optimizer.step(), "outside the block of a step")
    assert [*steps] == []
    alone.step(1)


def test_what_follows_the_optimizer_is_told_to_be_left_out(alone: Training) -> None:
    steps = alone.elastic().steps(3)
    step, error = next(steps), as_if_lost()
    step.__enter__()
    alone.step(0)
    with pytest.warns(UserWarning, match="step 0 has failed after its optimizer had stepped") as warned:
        assert step.__exit__(type(error), error, None)
    assert warned[0].filename == __file__
    assert next(steps).index == 1


# ---- the loop -------------------------------------------------------------------------------------------------------


def test_where_it_is_shows_in_its_text_and_the_last_number_after_the_loop(alone: Training) -> None:
    elastic = alone.elastic()
    assert repr(elastic) == "Elastic(step 0 of rank 0, members [0])"
    for step in elastic.steps(3):
        with step:
            alone.step(step.index)
    assert step.index == 2


def test_a_loop_whose_begin_has_failed_may_be_tried_again(alone: Training) -> None:
    elastic = alone.elastic()
    with patch.object(elastic, "_move", Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        next(elastic.steps(3))
    steps = elastic.steps(3)
    with next(steps):
        alone.step(0)
    assert next(steps).index == 1


def loop(alone: Training, fail: Callable[[int], Any], runs: list[int]) -> None:
    for step in alone.elastic().steps(3):
        runs.append(step.index)
        with contextlib.suppress(KeyError), step:
            fail(step.index)
            alone.step(step.index)


def test_an_error_that_comes_again_and_again_leaves_its_block(alone: Training) -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise as_if_lost()

    runs: list[int] = []
    with pytest.raises(RankLostError):
        loop(alone, fail, runs)
    assert runs == [0, 1, 1, 1, 1]


def test_an_error_that_was_caught_outside_the_block_is_told(alone: Training) -> None:
    runs: list[int] = []
    with pytest.raises(RuntimeError, match="an error has left the block of step 1, so this rank is out"):
        loop(alone, partial({0: None}.__getitem__), runs)
    assert runs == [0, 1]


def test_a_step_that_is_not_entered_is_an_error(alone: Training) -> None:
    with pytest.raises(RuntimeError, match="write `with step:` around its code"):
        for _ in alone.elastic().steps(3):
            pass
