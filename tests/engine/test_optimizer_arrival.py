"""``shard_optimizer(overlap_gather=True)``: steps return while parameters are on their way, and uses wait for them."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import fastsync
from fastsync.errors import SyncError
from fastsync.optimizer import own_shards
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.sharded_trainings import after_attach, attached, loss_of, same, step, two_layers, values
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

apart = on_ranks(2, shared_memory=False)
Trained = tuple[nn.Module, Optimizer, GradientSynchronizer]


def overlapping(**options: Any) -> Trained:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    sync = fastsync.attach(model, bucket_cap_mb=0.001)
    fastsync.shard_optimizer(sync, optimizer, overlap_gather=True, **options)
    return model, optimizer, sync


def started(rank: int) -> Trained:
    """After the first step, which waits, because ranks compare its weights."""
    trained = overlapping()
    step(trained[0], trained[1], rank)
    assert not any(are_on_their_way(trained[0]))
    return trained


def plain(rank: int) -> Trained:
    trained = attached(shared=False, bucket_cap_mb=0.001)
    step(trained[0], trained[1], rank)
    return trained


def are_on_their_way(model: nn.Module) -> list[bool]:
    return [type(parameter) is not nn.Parameter for parameter in model.parameters()]


def changed_in_place(model: nn.Module) -> Tensor:
    """As a user's own weight decay."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return next(model.parameters()).detach()


def averaged(model: nn.Module) -> list[Tensor]:
    average = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    torch._foreach_lerp_(average, list(model.parameters()), 0.5)
    return average


def saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return values(torch.load(file, weights_only=False))


def in_a_thread(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(loss_of(model, 0).detach())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


USES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: loss_of(model, 0).detach(),
    "state_dict": lambda model: dict(model.state_dict()),
    "deepcopy": lambda model: values(copy.deepcopy(model)),
    "torch.save": saved,
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "in place": changed_in_place,
    "foreach": averaged,
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), torch.ones(1, 5)
    ).detach(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "threads": in_a_thread,
}


@on_ranks(2, shared_memory=False, cases={"use": list(USES)})
def test_whatever_uses_a_parameter_sees_its_new_value(rank: int, world_size: int, use: str) -> None:
    """The bits of every rank's own step, for several steps."""
    own, reference = started(rank), plain(rank)
    for number in range(1, 4):
        for model, optimizer, _ in (own, reference):
            step(model, optimizer, rank, number)
        assert are_on_their_way(own[0]) == [True] * 4
        same(USES[use](own[0]), USES[use](reference[0]))
    same(values(own[0]), values(reference[0]))
    assert not any(are_on_their_way(own[0]))


@apart
def test_a_layer_waits_for_its_own_bucket(rank: int, world_size: int) -> None:
    """The first layer's values are sent first. Gradients and what never changes wait for nothing."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    optimizer = AdamW(model.parameters(), fused=True)
    fastsync.shard_optimizer(fastsync.attach(model, bucket_cap_mb=0.001), optimizer, overlap_gather=True)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    model.zero_grad()
    assert all(each.grad is None and each.requires_grad and each.shape == (64, 64) for each in model.parameters())
    assert are_on_their_way(model) == [True] * 3
    hidden = torch.ones(1, 64)
    for number, layer in enumerate(model):
        hidden = layer(hidden)
        assert are_on_their_way(model) == [later > number for later in range(3)]


@on_ranks(2, shared_memory=False, cases={"shared_memory": [True, False]})
def test_nothing_is_on_its_way_once_it_was_waited_for(rank: int, world_size: int) -> None:
    model, optimizer, sync = started(rank)
    for wait in (sync.wait_for_parameters, optimizer.state_dict, sync.detach):
        step(model, optimizer, rank)
        wait()
        assert wait is not sync.wait_for_parameters or not any(are_on_their_way(model))
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, values(model))
        same(*gathered)


@apart
def test_compiled_code_is_told_to_wait(rank: int, world_size: int) -> None:
    (model, optimizer, sync), inputs = started(rank), torch.ones(1, 5)
    compiled = torch.compile(model, backend="eager")
    for number in range(1, 4):
        sync.wait_for_parameters()
        same(compiled(inputs), model(inputs))
        step(model, optimizer, rank, number)
    refused(lambda: compiled(inputs), "wait_for_parameters()", kind=RuntimeError)
    sync.wait_for_parameters()
    same(compiled(inputs), model(inputs))


@apart
def test_ranks_have_to_overlap_alike(rank: int, world_size: int) -> None:
    model, sync = after_attach()
    optimizer = AdamW(model.parameters(), fused=True)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer, overlap_gather=rank == 0), "may wait for")
    refused(lambda: fastsync.shard_optimizer(sync, optimizer, overlap_gather=2), "overlap_gather")  # type: ignore[arg-type]


@apart
def test_a_step_that_fails_on_one_rank_is_told_where_a_parameter_is_used(rank: int, world_size: int) -> None:
    model, optimizer, sync = started(rank)
    loss_of(model, rank).backward()
    if rank == 1:
        inner: Any = sync._optimizer_shards
        inner._pieces.inner.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    else:
        optimizer.step()
        with pytest.raises(SyncError) as told:
            values(model)
        assert told.value.ranks == (1,)
    assert not any(are_on_their_way(model))
    dist.barrier()
    optimizer.zero_grad()
    refused(lambda: step(model, optimizer, rank, 2), kind=RuntimeError)


@apart
def test_both_ranks_keep_their_own_errors(rank: int, world_size: int) -> None:
    """The second bucket's step fails, when the first one's values are on their way."""
    model, optimizer, sync = started(rank)
    loss_of(model, rank).backward()
    pieces: Any = sync._optimizer_shards
    steps, own_step = iter([True]), pieces._pieces.inner.step
    pieces._pieces.inner.step = lambda: own_step() if next(steps, False) else [1 / 0, {}["x"]][rank]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert not any(are_on_their_way(model))


@apart
def test_a_signal_that_comes_during_a_wait(rank: int, world_size: int) -> None:
    """Its handler saves the model, as before a preemption. Ctrl-C leaves the values on their way."""
    (model, optimizer, _), reference = started(rank), plain(rank)
    for trained in ((model, optimizer), reference[:2]):
        step(*trained, rank, 1)
    saved: list[list[Tensor]] = []
    finish = own_shards._Rows.finish

    def first_saves(rows: Any, *given: Any) -> None:
        with patch.object(own_shards._Rows, "finish", finish):
            saved.append(values(model))
        finish(rows, *given)

    def first_is_interrupted(rows: Any, *given: Any) -> None:
        raise KeyboardInterrupt

    with patch.object(own_shards._Rows, "finish", first_is_interrupted), pytest.raises(KeyboardInterrupt):
        loss_of(model, rank)
    assert are_on_their_way(model) == [True] * 4
    with patch.object(own_shards._Rows, "finish", first_saves):
        same(values(model), values(reference[0]))
    same(saved[0], values(reference[0]))


@apart
def test_threads_that_use_a_model_while_it_steps(rank: int, world_size: int) -> None:
    (model, optimizer, _), reference = started(rank), plain(rank)
    is_over, errors = threading.Event(), []

    def act() -> None:
        while not is_over.is_set():
            try:
                model(torch.ones(1, 5))
            except Exception as error:
                errors.append(error)

    actor = threading.Thread(target=act)
    actor.start()
    try:
        for number in range(1, 20):
            for trained in ((model, optimizer), reference[:2]):
                step(*trained, rank, number)
    finally:
        is_over.set()
        actor.join()
    assert not errors
    same(values(model), values(reference[0]))


@apart
def test_a_training_that_is_over_is_freed_and_rows_take_no_more_than_parameters(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 20, bias=False), nn.Linear(20, 300))
    optimizer = AdamW(model.parameters(), fused=True)
    sync = fastsync.attach(model, bucket_cap_mb=0.001)
    fastsync.shard_optimizer(sync, optimizer, overlap_gather=True)
    for _ in range(4):
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    sync.wait_for_parameters()
    kept = sum(rows.numel() for rows in sync._optimizer_shards._home._spare)  # type: ignore[union-attr]
    assert kept <= 1.1 * sum(parameter.nbytes for parameter in model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    assert any(are_on_their_way(model))
    left = [weakref.ref(each) for each in (model, sync, optimizer)]
    del model, optimizer, sync
    gc.collect()
    assert [each() for each in left] == [None] * 3


@apart
def test_torchscript_is_refused(rank: int, world_size: int) -> None:
    model = torch.jit.script(nn.Linear(3, 3))
    optimizer = AdamW(model.parameters(), fused=True)
    refused(lambda: fastsync.shard_optimizer(fastsync.attach(model), optimizer, overlap_gather=True), "overlap_gather")


def use_after_a_loss(rank: int, world_size: int) -> bool:
    model, optimizer, sync = started(rank)
    step(model, optimizer, rank, 1)
    if rank == 1:
        sync.wait_for_parameters()  # rank 1's own values have been sent
        os.kill(os.getpid(), 9)
    values(model)
    refused(lambda: step(model, optimizer, rank, 2), kind=RuntimeError)
    return any(are_on_their_way(model))


def test_a_lost_rank_is_told() -> None:
    assert run_ranks(use_after_a_loss, 2, lost=(1,), shared_memory=False)[0] is False
