"""Where a block of DiLoCo begins and ends: loaded weights, sites that take different numbers of steps, who steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import time
import warnings
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from fastsync import _C, DiLoCo, LocalSGD, TopK
from tests.engine.sites import assert_sites_are_equal, make_model, make_optimizer, make_site, train_step, weights
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

MEAN = functools.partial(SGD, lr=1.0)
OPTIONS: list[dict[str, Any]] = [
    {"sync_every": 4},
    {"sync_every": 4, "compression": "none", "outer_optimizer": MEAN},
    {"sync_every": 10**9},
    {"sync_every": 5, "fragments": 3, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
    {"sync_every": 4, "fragments": 2, "compression": TopK()},
    {"sync_every": 4, "compression": "lowrank:2"},
    {"sync_every": 4, "compression": "bf16"},
]


@on_ranks(3, cases={"steps": [(6, 6, 6), (3, 9, 6), (0, 5, 13)], "options": OPTIONS})
def test_all_sites_leave_a_block_with_equal_weights(
    rank: int, world_size: int, options: dict[str, Any], steps: tuple[int, ...]
) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(3))
    optimizer = SGD(model.parameters(), lr=0.01)
    sync = DiLoCo(model, optimizer, **options)
    for epoch in range(2):
        before = weights(model)
        with sync:
            for step in range(steps[rank]):
                train_step(model, optimizer, rank, 100 * epoch + step)
        assert_sites_are_equal(model, world_size)
        assert not all(torch.equal(mine, was) for mine, was in zip(weights(model), before, strict=True))


@on_ranks(2)
def test_the_last_mean_is_of_what_each_site_has_learned_since(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = SGD([weight], lr=1.0)
    with LocalSGD(nn.ParameterList([weight]), optimizer, sync_every=4):
        for step in range([6, 9][rank]):  # the mean at step 8 is of steps 5 and 6 here, and of 5 to 8 there
            weight.grad = torch.full((4,), -(1.0 + rank) * (step + 1))
            optimizer.step()
    first = (10 + 2 * 10) / 2
    second = ((5 + 6) + 2 * (5 + 6 + 7 + 8)) / 2
    third = 2 * 9  # rank 0 has not moved
    assert torch.equal(weight.detach(), torch.full((4,), first + second + third))


@on_ranks(2, cases={"compression": [TopK(decay=1.0), "int4+ef"]})
def test_what_a_site_that_is_done_had_not_sent_counts_as_before(rank: int, world_size: int, compression: Any) -> None:
    """Only site 0 moves, once. So half of its change arrives, however many means it takes."""
    change = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = SGD([weight], lr=1.0)
    with DiLoCo(
        nn.ParameterList([weight]), optimizer, sync_every=1, outer_optimizer=MEAN, compression=compression
    ) as sync:
        for step in range([1, 80][rank]):
            weight.grad = -change if rank == step == 0 else torch.zeros(4096)
            optimizer.step()
    (state,) = sync.state_dict()["unsent"]
    unsent = sum([torch.zeros(4096), *([state["unsent"]] if "unsent" in state else state["residuals"].values())])
    torch.distributed.all_reduce(unsent)  # of an outer gradient, so its sign is the other one
    torch.testing.assert_close(weight.detach(), (change + unsent) / 2, rtol=0, atol=1e-5)


@on_ranks(2)
def test_steps_are_counted_that_the_optimizer_takes(rank: int, world_size: int) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=10)
    for num_steps in (3, 8):
        with sync:
            for step in range(sync.num_steps, num_steps + rank):
                train_step(model, optimizer, rank, step)
        assert sync.num_steps == num_steps + rank
    saved = sync.state_dict()
    resumed = DiLoCo(model, optimizer, sync_every=10)
    resumed.load_state_dict(saved)
    assert resumed.num_steps == 8 + rank
    assert resumed.rank == rank


@on_ranks(2)
def test_a_mean_that_is_on_its_way_when_an_error_ends_the_block_arrives(rank: int, world_size: int) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=2, fragments=2, fragment_sync_delay=1)
    average = sync._average
    sync._average = lambda *args: (time.sleep(0.2 * rank), average(*args))
    for epoch in range(2):
        with contextlib.suppress(KeyError), sync:
            for step in range(4):
                train_step(model, optimizer, rank, 100 * epoch + step)
            if epoch == 0:
                raise KeyError("both sites")
    assert_sites_are_equal(model, world_size)


@on_ranks(2)
def test_a_block_that_nothing_has_moved_in_changes_nothing(rank: int, world_size: int) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=2)
    with sync:
        for step in range(4):
            train_step(model, optimizer, rank, step)
    before = weights(model)
    with sync:
        pass
    assert all(torch.equal(mine, was) for mine, was in zip(weights(model), before, strict=True))


def trained_where_one_is_lost_at_the_end(rank: int, world_size: int) -> list[Tensor]:
    model, optimizer, sync = make_site(DiLoCo, sync_every=2, timeout=3.0)
    try:
        with warnings.catch_warnings(record=True) as caught, sync:
            warnings.simplefilter("always")
            for step in range(4 + 3 * rank):
                train_step(model, optimizer, rank, step)
                if rank == 2 and step == 4:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        torch.distributed.distributed_c10d._get_default_store().wait(["never"])
    assert any("ranks [2] were lost" in str(each.message) and "[0, 1] go on" in str(each.message) for each in caught)
    return weights(model)


def test_who_has_ended_goes_on_without_a_site_that_is_lost() -> None:
    first, second, _ = run_ranks(trained_where_one_is_lost_at_the_end, 3, lost=[2])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


# ---- weights that are loaded ----------------------------------------------------------------------------------------


def other_weights() -> dict[str, Tensor]:
    model = make_model()
    return {name: value + 1 for name, value in model.state_dict().items()}


@on_ranks(2, cases={"trained_before": [False, True], "inside": [False, True]})
def test_weights_that_all_ranks_load_are_what_they_have_in_common(
    rank: int, world_size: int, inside: bool, trained_before: bool
) -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.0)
    sync = DiLoCo(model, optimizer, sync_every=2)
    if trained_before:
        with sync:
            train_step(model, optimizer, rank, 0)
    if not inside:
        model.load_state_dict(other_weights())
    with sync:
        if inside:
            get_optimizer_state_dict(model, optimizer)  # takes a step with zeros, which is none of the training
            model.load_state_dict(other_weights())
        for step in range(3):
            train_step(model, optimizer, rank, step)
    assert all(torch.equal(mine, other_weights()[name]) for name, mine in model.state_dict().items())


@on_ranks(2, cases={"loads": ["weights", "a state"]})
def test_what_one_rank_loads_alone_is_told(rank: int, world_size: int, loads: str) -> None:
    model, optimizer, sync = make_site(LocalSGD, sync_every=2)
    if loads == "a state":
        if rank == 0:
            sync.load_state_dict(copy.deepcopy(sync.state_dict()))
        sync.__enter__()
        refused(lambda: train_step(model, optimizer, rank, 0), "ranks [0] of [0, 1] go on from load_state_dict")
        return
    with sync:
        if rank == 0:
            model.load_state_dict(other_weights())
        with pytest.warns(UserWarning, match=r"weights of ranks \[0\] of \[0, 1\] were changed before the first step"):
            train_step(model, optimizer, rank, 0)
    assert_sites_are_equal(model, world_size)


# ---- who steps ------------------------------------------------------------------------------------------------------


@on_ranks(2, cases={"is_one_of_several": [False, True]})
def test_an_optimizer_that_never_steps_is_told_of(rank: int, world_size: int, is_one_of_several: bool) -> None:
    """At the end of a block if nothing else has counted, and after so many steps of another one."""
    model = make_model()
    steps = AdamW(model[0].parameters() if is_one_of_several else model.parameters(), lr=0.1)
    never = SGD(model[4].parameters() if is_one_of_several else model.parameters(), lr=0.1)
    sync = LocalSGD(model, [steps, never] if is_one_of_several else never, sync_every=20)

    def train(num_steps: int) -> None:
        with sync:
            for step in range(num_steps):
                train_step(model, steps, rank, step)

    said = "the SGD that the LocalSGD was given has not"
    train(1) if is_one_of_several else refused(lambda: train(3), said, kind=RuntimeError)
    assert_sites_are_equal(model, world_size)
    of_many = said if is_one_of_several else "stepped the model's parameters 21 times"
    refused(lambda: train(100), of_many, kind=RuntimeError)


@on_ranks(2)
def test_several_optimizers_may_step_parts_of_the_model(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(7), *make_model())
    first, second = SGD(model[1].parameters(), lr=0.1), AdamW(model[3].parameters(), lr=0.1)
    with warnings.catch_warnings(), LocalSGD(model, second, sync_every=3) as sync:
        warnings.simplefilter("error")
        for step in range(6):
            inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(1000 * rank + step))
            model(inputs).square().sum().backward()
            first.step()
            second.step()
        assert sync._schedule.step == 6
        assert_sites_are_equal(model, world_size)


@on_ranks(2)
def test_a_step_of_several_counts_when_each_has_stepped(rank: int, world_size: int) -> None:
    """Here the second one steps in every other iteration alone, as where one trains a discriminator more often."""
    model = make_model()
    often, seldom = SGD(model[0].parameters(), lr=0.1), SGD(model[4].parameters(), lr=0.1)
    with LocalSGD(model, [often, seldom, seldom], sync_every=2) as sync:
        for step in range(1, 9):
            train_step(model, [often, seldom] if step % 2 == 0 else often, rank, step)
            assert sync._schedule.step == step // 2
            if step % 4 == 0:
                assert_sites_are_equal(model, world_size)


class Clipped(SGD):
    """Whose step calls that of its base, which is wrapped as well where a plain one exists."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        return super().step(closure)


class FailsOnce(Clipped):
    """Fails in its first step, before or after that of its base."""

    is_to_fail = ""

    def step(self, closure: Any = None) -> Any:
        if self.is_to_fail == "before":
            raise ArithmeticError("before")
        result = super().step(closure)
        if self.is_to_fail == "after":
            raise ArithmeticError("after")
        return result


@on_ranks(1, cases={"when": ["before", "after"]})
def test_a_step_that_is_tried_again_counts_once(rank: int, world_size: int, when: str) -> None:
    others = [SGD(nn.Linear(2, 2).parameters(), lr=0.1), Clipped(nn.Linear(2, 2).parameters(), lr=0.1)]
    model = make_model()
    optimizer = FailsOnce(model.parameters(), lr=0.1)
    with LocalSGD(model, optimizer, sync_every=4) as sync:
        optimizer.is_to_fail = when
        try:
            train_step(model, optimizer, rank, 0)
        except ArithmeticError:  # its traceback keeps the frames of the step
            assert (sync._schedule.step, _C.optimizer_calls()) == (0, [])
            optimizer.is_to_fail = ""
            train_step(model, optimizer, rank, 0)
        assert sync._schedule.step == 1
    del others


@on_ranks(1)
def test_a_first_step_without_rate_and_gradient_counts_unless_a_checkpoint_takes_it(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.0)
    with LocalSGD(model, optimizer, sync_every=4) as sync:
        get_optimizer_state_dict(model, optimizer)
        assert (sync._schedule.step, bool(optimizer.state)) == (0, True)
        optimizer.state.clear()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert sync._schedule.step == 1


@on_ranks(1)
def test_the_calls_that_a_thread_is_inside(rank: int, world_size: int) -> None:
    SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer = Clipped(make_model().parameters(), lr=0.1)
    told: list[list[int]] = []
    optimizer.register_step_pre_hook(lambda *_: told.append(_C.optimizer_calls()))
    optimizer.register_step_post_hook(lambda *_: told.append(_C.optimizer_calls()))
    optimizer.step()
    thread = Thread(target=optimizer.step)
    thread.start()
    thread.join()
    for outer, both, both_after, outer_after in (told[:4], told[4:]):
        assert (len(outer), len(both)) == (1, 2)
        assert (both[0], both_after, outer_after) == (outer[0], both, outer)
    assert told[0] != told[4]
    assert _C.optimizer_calls() == []


class IsItsOwn:
    """A wrapper around itself."""

    def __init__(self) -> None:
        self.optimizer = self

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@pytest.mark.usefixtures("one_rank")
def test_what_is_no_optimizer_is_refused() -> None:
    model = make_model()
    optimizer = SGD(model.parameters())
    of_another = SGD(make_model().parameters(), lr=0.1)
    given: list[Any] = [
        [optimizer, None], [], {"inner": optimizer}, optimizer.step, StepLR(optimizer, 1), SGD, IsItsOwn(),
        model.parameters(), of_another, [make_optimizer(model), of_another],
    ]  # fmt: skip
    for each in given:
        refused(lambda: DiLoCo(model, each), "optimizer:")
    refused(lambda: DiLoCo(optimizer, model), "model:")


# ---- blocks that an error ends --------------------------------------------------------------------------------------


@on_ranks(2, cases={"fragments": [1, 2]})
def test_an_error_sends_nothing_and_says_what_was_not_averaged(rank: int, world_size: int, fragments: int) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=4, fragments=fragments)
    with sync:
        train_step(model, optimizer, rank, 0)
    with pytest.raises(KeyError) as nothing_learned, sync:
        raise KeyError
    before: dict[str, Any] = {}

    def fail() -> None:
        with sync:
            for step in range(7):
                train_step(model, optimizer, rank, step)
            before.update(weights=weights(model), num_sent=sync._num_sent)
            raise KeyError

    with pytest.raises(KeyError) as error:
        fail()
    assert sync._num_sent == before["num_sent"]
    assert all(map(torch.equal, weights(model), before["weights"]))
    if sys.version_info >= (3, 11):
        assert not hasattr(nothing_learned.value, "__notes__")
        (note,) = error.value.__notes__
        assert "ended a block of DiLoCo" in note
        assert "in its last 3 steps. If every site begins another block" in note
    with sync:
        pass
    assert_sites_are_equal(model, world_size)


@on_ranks(
    3,
    cases={
        "options": [
            {"sync_every": 2},
            {"sync_every": 2, "fragment_sync_delay": 1},
            {"sync_every": 4, "fragments": 2},
            {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3},
        ]
    },
)
def test_a_site_that_alone_begins_another_block_is_an_error_on_all(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    model, optimizer, sync = make_site(DiLoCo, compression="none", **options)

    def train(num_steps: int, *, fails: bool = False) -> None:
        with sync:
            for step in range(num_steps):
                train_step(model, optimizer, rank, step)
            if fails:
                raise KeyError

    if rank == 1:
        with pytest.raises(KeyError):
            train(3, fails=True)
    refused(lambda: train(20), "ranks [1] of [0, 1, 2] begin another block, and")
    num_steps = sync.num_steps
    sync.state_dict()
    for _ in range(2):
        train(3)  # which all begin
        assert_sites_are_equal(model, world_size)
    assert sync.num_steps == num_steps + 6
    assert len(set(everyones_number(sync._state.num_averaged, world_size))) == 1


def everyones_number(mine: int, world_size: int) -> list[int]:
    theirs = [torch.zeros((), dtype=torch.int64) for _ in range(world_size)]
    torch.distributed.all_gather(theirs, torch.tensor(mine))
    return [int(each) for each in theirs]


@on_ranks(2)
def test_an_error_of_a_mean_in_the_background_is_raised_once(rank: int, world_size: int) -> None:
    model, optimizer, sync = make_site(DiLoCo, sync_every=2, fragments=2, fragment_sync_delay=1)
    average = sync._average

    def fail(*args: object) -> None:
        raise ValueError("of this mean")

    for place in ("block", "state_dict", "next"):
        sync._average = fail
        before = weights(model)
        raises = pytest.raises(ValueError, match="of this mean")
        with raises if place == "block" else pytest.raises(KeyError), sync:
            for step in range(4 if place == "block" else 1):
                train_step(model, optimizer, rank, step)
            raise KeyError
        if place == "state_dict":
            refused(lambda: sync.state_dict(), "of this mean")
        if place != "next":
            assert sync.state_dict()["due"] == [None, None]
        assert not any(map(torch.equal, before, weights(model)))  # what the site has learned stays its own
        sync._average = average
        with sync:
            for step in range(3):
                train_step(model, optimizer, rank, step)
        assert_sites_are_equal(model, world_size)


@pytest.mark.usefixtures("one_rank")
def test_a_block_inside_a_block_is_refused() -> None:
    model, optimizer, sync = make_site(LocalSGD, sync_every=1)
    with sync:
        refused(sync.__enter__, "a with block of this LocalSGD has begun already", kind=RuntimeError)
        train_step(model, optimizer, 0, 0)
        assert sync._schedule.step == 1


@on_ranks(2)
def test_a_block_leaves_the_hooks_of_all_optimizers_alone(rank: int, world_size: int) -> None:
    """Another thread may be going through them."""
    model, optimizer, sync = make_site(DiLoCo, sync_every=2)
    with sync:
        train_step(model, optimizer, rank, 0)
    of_torch = sys.modules["torch.optim.optimizer"]
    hooks = of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks
    before = [[*each] for each in hooks]
    with DiLoCo(model, optimizer, sync_every=2):
        train_step(model, optimizer, rank, 0)
        assert [[*each] for each in hooks] == before
