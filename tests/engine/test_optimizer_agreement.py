"""``shard_optimizer``: ranks that would step in different ways, that skip a step, that fail, or are lost."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import fastsync
from tests.engine.sharded_trainings import BOTH_WAYS, attached, backward, in_both_ways, same, step, two_layers, values
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused


@on_ranks(2, cases=BOTH_WAYS | {"what": ["settings", "lr", "gradients", "state", "clips", "scales"]})
def test_ranks_that_would_step_in_different_ways(rank: int, world_size: int, what: str) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank, enabled=what == "scales")
    scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum()).backward()
    saved = copy.deepcopy(optimizer.state_dict())
    if what == "lr":  # a tensor prints four digits
        what = "settings"
        optimizer.param_groups[0]["lr"] = torch.tensor(0.00102 + 0.00002 * rank)
    elif rank == 1:
        if what == "settings":
            optimizer.param_groups[0]["lr"] = 0.2
        elif what == "clips":
            fastsync.clip_grad_norm_(sync, 1e-3)
        elif what == "gradients":
            model[0].bias.grad = None
        elif what == "state":
            optimizer.load_state_dict(saved)
    before = values(model)
    with pytest.raises(RuntimeError, match=f"different .*{what}.*: rank 1 is not as rank 0"):
        scaler.step(optimizer)
    same(values(model), before)


@on_ranks(2, cases=BOTH_WAYS)
def test_statistics_that_one_rank_alone_asks_for(rank: int, world_size: int) -> None:
    """With micro-batches they are of all means, which ranks gather for it."""
    model = two_layers()
    optimizer = AdamW(model.parameters())
    sync = fastsync.attach(model, micro_batches=2)
    fastsync.shard_optimizer(sync, optimizer)
    for _ in sync.micro_batches():
        model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="another rank is not there"):
        _ = sync.grad_stats() if rank == 1 else optimizer.step()


@on_ranks(2, cases=BOTH_WAYS | {"micro_batches": [None, 2]})
def test_inf_in_a_gradient_that_is_not_averaged_is_told(rank: int, world_size: int, micro_batches: int | None) -> None:
    model, own = two_layers(), nn.Parameter(torch.ones(3))
    optimizer = AdamW([*model.parameters(), own], fused=True)
    sync = fastsync.attach(model, micro_batches=micro_batches)
    fastsync.shard_optimizer(sync, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for finds in (True, False):
        factor = torch.inf if finds and rank == 1 else 1.0
        optimizer.zero_grad()
        for _ in sync.micro_batches() if micro_batches else range(1):
            scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum() + (own * factor).sum()).backward()
        if finds:
            refused(lambda: scaler.step(optimizer), "different finds of a GradScaler", kind=RuntimeError)
            assert not hasattr(optimizer, "grad_scale"), "the next step would multiply by it"
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        else:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0


@in_both_ways
def test_a_scaler_skips_all_parameters_of_an_optimizer(rank: int, world_size: int) -> None:
    """Also those of another handle, whose means are finite."""
    models = two_layers(), two_layers()
    optimizer = AdamW([parameter for model in models for parameter in model.parameters()], fused=True)
    for model in models:
        fastsync.shard_optimizer(fastsync.attach(model), optimizer)
    before = [values(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for model, factor in zip(models, (1.0, torch.inf if rank == 1 else 1.0), strict=True):
        scaler.scale(model(torch.full((1, 5), 1.0 + rank)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    same([values(model) for model in models], before)


@in_both_ways
def test_scalers_agree_even_without_gradients(rank: int, world_size: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))])
    optimizer = AdamW(model.parameters(), fused=True)
    sync = fastsync.attach(model)
    fastsync.shard_optimizer(sync, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if rank == 0:
        scaler.scale(model[0].sum() * torch.inf).backward()
    else:
        scaler.scale(model[1].sum()).backward()
    assert sync.grad_stats().num_nonfinite > 0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert model[0].tolist() == [1.0] * 3


def go_on_without_rank_1(rank: int, world_size: int) -> list[str]:
    """Returns the texts of the errors of the step that rank 1 is lost in, and of detach(), if it raises one."""
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    before = values(model)
    backward(model, rank)
    if rank == 1:
        os.kill(os.getpid(), 9)
    said = [refused(optimizer.step, kind=RuntimeError)]
    same(values(model), before)
    try:
        sync.detach()
    except RuntimeError as error:
        said.append(str(error))
        assert not optimizer.state
    step(model, optimizer, rank)
    assert not torch.equal(values(model)[0], before[0])
    return said


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_lost_rank_is_named_and_takes_with_it_what_it_had_alone(shared_memory: bool) -> None:
    said = run_ranks(go_on_without_rank_1, 2, lost=(1,), shared_memory=shared_memory)[0]
    assert "the step of the optimizer failed on rank 0 of 2: " in said[0]
    assert ("rank 1 has ended" if shared_memory else "rank 1: no answer") in said[0]
    assert len(said) == (1 if shared_memory else 2)
    assert all("so the optimizer's state is lost: go on from a checkpoint" in each for each in said[1:])


@in_both_ways
def test_a_step_that_fails_on_one_rank_is_told(rank: int, world_size: int) -> None:
    model, optimizer, _ = attached()
    step(model, optimizer, rank)
    backward(model, rank)
    if rank == 1:
        fastsync.handle_of(model)._optimizer_shards._pieces.inner.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    else:
        refused(lambda: optimizer.step(), "rank 1 has failed", kind=RuntimeError)
    dist.barrier()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"has failed|has ended"):
        step(model, optimizer, rank, 1)


@in_both_ways
def test_a_backward_that_fails_on_one_rank_holds_nobody_up(rank: int, world_size: int) -> None:
    model, optimizer, sync = attached()
    step(model, optimizer, rank)
    output = model(torch.full((1, 5), 1.0 + rank))
    if rank == 1:
        failing = model[2].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        failing.remove()
    else:
        output.sum().backward()
        assert sync.grad_stats().num_nonfinite > 0
        assert sync.grad_stats().grad_norm.isnan()
    optimizer.zero_grad()
    step(model, optimizer, rank, 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
