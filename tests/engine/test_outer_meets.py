"""DiLoCo where other features meet it on the same weights: join(), Elastic, shard_optimizer."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import fastsync
from fastsync import DiLoCo, Elastic, LocalSGD
from tests.engine.same_data import same_data_is_meant
from tests.engine.sites import assert_sites_are_equal, make_model, make_optimizer, train_step
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

# ---- join() ---------------------------------------------------------------------------------------------------------


@on_ranks(4, cases={"is_one_group": [False, True], "first": ["block", "join", "step"]})
def test_join_inside_sites_is_refused(rank: int, world_size: int, is_one_group: bool, first: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    inside, between = (None, None) if is_one_group else (mesh["ranks"], mesh["sites"])
    same_data_is_meant()
    model = make_model()
    optimizer = make_optimizer(model)
    sync = fastsync.attach(model, process_group=inside)
    outer = LocalSGD(model, optimizer, sync_every=2, process_group=between)

    def train() -> None:
        if first == "block":
            with outer, sync.join(optimizer):
                train_step(model, optimizer, rank // 2, 0)
        elif first == "join":
            with sync.join(optimizer), outer:
                train_step(model, optimizer, rank // 2, 0)
        else:
            with sync.join(optimizer):
                train_step(model, optimizer, rank // 2, 0)
                outer.step()

    refused(lambda: train(), "the ranks of a site take equally many steps,", kind=RuntimeError)


@on_ranks(2)
def test_join_goes_with_a_block_that_it_has_nothing_to_do_with(rank: int, world_size: int) -> None:
    """With a site of one rank, and with another model."""
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    model, other = make_model(), make_model()
    optimizer, others = make_optimizer(model), make_optimizer(other)
    sync, sync_of_other = fastsync.attach(model, process_group=alone), fastsync.attach(other)
    outer = LocalSGD(model, optimizer, sync_every=2)
    with outer, sync.join(optimizer):
        for step in range(3 + rank):
            train_step(model, optimizer, rank, step)
    assert_sites_are_equal(model, world_size)
    with outer, sync_of_other.join(others):
        for step in range(3 + rank):
            train_step(other, others, rank, step)
    with sync.join(optimizer), outer:
        train_step(model, optimizer, rank, 0)
    with sync_of_other.join(others):
        train_step(other, others, rank, 0)
    assert_sites_are_equal(model, world_size)
    assert_sites_are_equal(other, world_size)


# ---- gradients that are averaged at each step ------------------------------------------------------------------------


def average_by(entry_point: str, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    if entry_point == "attach":
        fastsync.attach(model, process_group=group)
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=group)


@on_ranks(2, cases={"entry_point": ["attach", "DDP"], "outer": [DiLoCo, LocalSGD]})
def test_it_says_once_that_it_adds_nothing_over_the_ranks_of_attach(
    rank: int, world_size: int, entry_point: str, outer: type[DiLoCo]
) -> None:
    model = make_model()
    wrapped = average_by(entry_point, model, None)
    optimizer = make_optimizer(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with outer(wrapped, optimizer, sync_every=2):
            for step in range(6):
                train_step(wrapped, optimizer, rank, step)
    assert [str(each.message)[:39] for each in said] == ["fastsync: the gradients of ranks [0, 1]"] * (rank == 0)


@on_ranks(4, cases={"is_one_group": [False, True], "entry_point": ["attach", "DDP"]})
def test_sites_of_several_ranks_are_told_nothing(
    rank: int, world_size: int, is_one_group: bool, entry_point: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    model = make_model()
    wrapped = average_by(entry_point, model, mesh["ranks"].get_group())
    optimizer = make_optimizer(model)
    warnings.simplefilter("error", UserWarning)
    with LocalSGD(wrapped, optimizer, sync_every=2, process_group=None if is_one_group else mesh["sites"]):
        for step in range(3):
            train_step(wrapped, optimizer, rank, step)


# ---- Elastic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elastic_is_first", [False, True])
@on_ranks(2)
def test_elastic_around_sites_is_refused(rank: int, world_size: int, elastic_is_first: bool, tmp_path: str) -> None:
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    model = make_model()
    optimizer = make_optimizer(model)
    sync = fastsync.attach(model, process_group=alone)
    store = FileStore(f"{tmp_path}/store {rank}", 1)
    if elastic_is_first:
        elastic = Elastic(model, optimizer, sync, store=store)
        refused(lambda: DiLoCo(model, optimizer), "model:")
        for step in elastic.steps(2):
            with step:
                train_step(model, optimizer, rank, step.index)
        DiLoCo(model, optimizer)
    else:
        outer = LocalSGD(model, optimizer)
        refused(lambda: Elastic(model, optimizer, sync, store=store), "model:")
        del outer
        Elastic(model, optimizer, sync, store=store)


# ---- shard_optimizer ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_shards_of_an_optimizer_are_refused_at_both_orders(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    outer = DiLoCo(nn.Sequential(model), optimizer)
    sync = fastsync.attach(model)
    refused(lambda: fastsync.shard_optimizer(sync, optimizer), "sync:")
    del outer
    fastsync.shard_optimizer(sync, optimizer)
    refused(lambda: DiLoCo(model, optimizer), "model:")
    sync.detach()
    DiLoCo(model, optimizer)


# ---- sites of several ranks of which some are lost ------------------------------------------------------------------


def train_until_some_are_lost(rank: int, world_size: int, lost: list[int], amid_a_mean: bool, inside: str) -> str:
    """Returns the error that a rank has ended with."""
    same_data_is_meant()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))
    model = make_model()
    wrapped = average_by(inside, model, mesh["ranks"].get_group())
    optimizer = make_optimizer(model)
    outer = LocalSGD(wrapped, optimizer, sync_every=2, process_group=mesh["sites"], timeout=10)

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with outer:
            for step in range(8):
                if rank in lost and step == 3 and amid_a_mean:
                    outer._average = die
                elif rank in lost and step == 4:
                    die()
                train_step(wrapped, optimizer, rank // 2, step)
        assert outer._sites.ranks == [rank]
        fastsync.check_consistency(model, process_group=mesh["ranks"])
    except RuntimeError as error:
        return str(error)
    return "none"


@pytest.mark.usefixtures("one_rank")
def test_the_ranks_of_a_site_have_to_be_known() -> None:
    """DDP does not tell them by the module inside."""
    model = make_model()
    optimizer = make_optimizer(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    refused(lambda: LocalSGD(model, optimizer), "model:")
    LocalSGD(ddp, optimizer)
    fastsync.register_comm_hook(ddp)
    LocalSGD(model, optimizer)


@pytest.mark.parametrize("inside", ["attach", "DDP"])
def test_a_rank_that_is_lost_amid_a_mean_ends_its_training(inside: str) -> None:
    """Only one of two groups knows of it, and their means are of other sites."""
    errors = run_ranks(train_until_some_are_lost, 4, [3], True, inside, lost=[3], timeout=60)
    assert sum("so the weights in this site would part" in error for error in errors[:2]) == 1
    assert "none" not in errors


def test_a_site_of_several_ranks_that_is_lost_is_left_by_all() -> None:
    errors = run_ranks(train_until_some_are_lost, 4, [2, 3], False, "attach", lost=[2, 3], timeout=60)
    assert errors[:2] == ["none", "none"]
