"""``shard_optimizer``: state that is saved, loaded, copied, inherited by a child, and given back."""

from __future__ import annotations

import copy
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import fastsync
from tests.engine.optimizer_shards import OF_WHOLE, OPTIMIZERS
from tests.engine.sharded_trainings import (
    after_attach,
    assert_alike,
    attached,
    backward,
    in_both_ways,
    same,
    step,
    step_alike,
    twins,
    two_layers,
    values,
)


@in_both_ways
def test_a_resumed_training_has_the_same_bits(rank: int, world_size: int) -> None:
    """The files are those of a plain training: each of the two resumes the other's."""
    saved: dict[bool, bytes] = {}
    ends = []
    for shared in (True, False):
        model, optimizer, _ = attached(shared)
        for number in range(3):
            step(model, optimizer, rank, number)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved[shared] = file.getvalue()
        for number in range(3, 6):
            step(model, optimizer, rank, number)
        ends.append(values(model))
    same(*ends)
    assert abs(len(saved[True]) - len(saved[False])) < 2000, "a view has saved its whole memory"
    for shared, before in ((True, False), (False, True), (True, True)):
        model, optimizer, _ = attached(shared)
        if before:
            step(model, optimizer, rank, 9)
        state = torch.load(io.BytesIO(saved[not shared]))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for number in range(3, 6):
            step(model, optimizer, rank, number)
        same(values(model), ends[0])


@in_both_ways
def test_state_that_was_loaded_before_attach(rank: int, world_size: int) -> None:
    plain, own, _ = attached(shared=False)
    for number in range(2):
        step(plain, own, rank, number)
    model = two_layers()
    model.load_state_dict(plain.state_dict())
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    for number in range(2, 4):
        step_alike([(model, optimizer), (plain, own)], rank, number)


@in_both_ways
def test_distributed_checkpoint_makes_the_state(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def of(kind: str) -> tuple[nn.Module, Optimizer]:
        model = two_layers()
        optimizer = (OPTIMIZERS | OF_WHOLE)[kind](model.parameters())
        fastsync.shard_optimizer(fastsync.attach(model), optimizer)
        return model, optimizer

    for kind in ("AdamW", "Normalized"):
        model, optimizer = of(kind)
        step(model, optimizer, rank)
        weights, state = (copy.deepcopy(each) for each in get_state_dict(model, optimizer))
        step(model, optimizer, rank, 1)
        end = values(model)
        fresh, of_fresh = of(kind)
        set_state_dict(fresh, of_fresh, model_state_dict=weights, optim_state_dict=state)
        step(fresh, of_fresh, rank, 1)
        same(values(fresh), end)


@in_both_ways
def test_copies_have_memory_of_their_own(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    before = values(model)
    copies = [copy.deepcopy(model), torch.load(_saved(model), weights_only=False)]
    average = torch.optim.swa_utils.AveragedModel(model)
    for each in (*copies, average.module):
        same(values(each), before)
        with torch.no_grad():
            each[0].weight.fill_(9.0)
    dist.barrier()
    same(values(model), before)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@in_both_ways
def test_a_forked_child_reads_the_parameters(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    total = model[0].weight.sum().item()
    if (child := os.fork()) == 0:
        is_right = model[0].weight.detach().sum().item() == total
        try:
            optimizer.step()
        except RuntimeError as error:
            os._exit(0 if is_right and "this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer, rank)


@in_both_ways
def test_detach_gives_each_rank_its_own_copy(rank: int, world_size: int) -> None:
    trainings = (model, optimizer, sync), (plain, own, _) = twins()
    step_alike(trainings, rank)
    sync.detach()
    assert_alike(trainings)
    same(optimizer.state_dict()["state"], own.state_dict()["state"])
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
    dist.barrier()
    assert model[0].weight.eq(rank).all()
    fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    with torch.no_grad():
        model[0].weight.copy_(plain[0].weight)
    dist.barrier()
    step_alike(trainings, rank, 1)


@in_both_ways
def test_momentum_that_was_loaded_as_none_begins(rank: int, world_size: int) -> None:
    """Older versions of torch have saved that of SGD without momentum."""
    trainings = [(model, SGD(model.parameters(), 0.1), sync) for model, sync in (after_attach(), after_attach())]
    fastsync.shard_optimizer(trainings[0][2], trainings[0][1])
    for _, each, _ in trainings:
        saved = each.state_dict()
        saved["state"] = {index: {"momentum_buffer": None} for index in range(4)}
        each.load_state_dict(saved)
        each.param_groups[0]["momentum"] = 0.9
    for number in range(3):
        step_alike(trainings, rank, number)
    same(*(optimizer.state_dict()["state"] for _, optimizer, _ in trainings))


@in_both_ways
def test_adam_counts_in_the_default_dtype(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    model, sync = after_attach()
    optimizer = Adam(model.parameters())
    fastsync.shard_optimizer(sync, optimizer)
    backward(model, rank)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"].dtype == torch.float64
