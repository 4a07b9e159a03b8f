"""attach(), and what comes and goes around it: models, handles, process groups, exceptions, the interpreter."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.handles_in_use import in_use
from tests.engine.attached import (
    assert_averages,
    assert_averages_nothing,
    assert_freed,
    assert_soon_none,
    attach,
    references_to,
)
from tests.engine.entry_points import AVERAGING, average
from tests.models import Mlp, assert_all_bitwise_equal, batch
from tests.ranks import on_ranks, open_group
from tests.refused import refused

# ---- the model and its handle ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_model_goes_first(rank: int, world_size: int) -> None:
    model = Mlp()
    sync = attach(model)
    references = references_to(model)
    assert_averages(model, rank)
    stats = sync.stats()
    del model
    gc.collect()
    assert references[0]() is None
    assert sync.stats() == stats
    assert sync.grad_stats().num_nonfinite.item() == 0
    sync.synchronize()  # the parameters live with the handle
    sync.detach()
    assert len(sync.parameters()) == 6
    del sync
    assert_freed(references)


@on_ranks(2)
def test_handle_is_dropped(rank: int, world_size: int) -> None:
    model = Mlp()
    handle = weakref.ref(attach(model))
    for step in range(3):
        gc.collect()
        assert_averages(model, rank, step)
    references = [*references_to(model), handle]
    del model
    assert_freed(references)

    model = Mlp()
    attach(model, overlap=False)
    references = references_to(model)
    del model
    assert_freed(references)


@on_ranks(2)
def test_detached(rank: int, world_size: int) -> None:
    model = Mlp()
    keys = list(model.state_dict())
    frozen = model.layers[0].weight.requires_grad_(False)
    sync = attach(model)
    assert not frozen.requires_grad
    frozen.requires_grad_(True)
    for number in range(3):
        assert_averages(model, rank, number)
        assert list(model.state_dict()) == keys
        handle = weakref.ref(sync)
        kept = [parameter.view_as(parameter) for parameter in model.parameters()]  # and with them their accumulators
        assert_averages(model, rank, number)
        sync.detach()
        sync.detach()
        assert_averages_nothing(model, rank, number)
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        sync = attach(model)
        assert_freed([handle])
    del kept


@on_ranks(2)
def test_handle_is_an_attribute(rank: int, world_size: int) -> None:
    model = Mlp()
    model.sync = attach(model)
    assert_averages(model, rank)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for plain in copies:
        assert plain.sync is None
        assert_averages_nothing(plain, rank, 1)
        assert_all_bitwise_equal(list(plain.parameters()), list(model.parameters()), "copied parameter")
    attach(copies[0])
    references = references_to(model)
    for each in (model, copies[0]):
        assert_averages(each, rank, 2)
    del model, each
    assert_freed(references)
    assert_averages(copies[0], rank, 3)


# ---- process groups -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_group_destroyed_while_a_model_is_attached(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = [Mlp() for _ in range(3)]
    handles = [attach(model) for model in models[:2]]
    for number in range(2):
        for model in models[:2]:
            assert_averages(model, rank, number)
        dist.destroy_process_group()
        if number == 0:
            open_group(str(tmp_path / "store"), rank, world_size)
            refused(partial(attach, models[0]), "averaged already, by attach")
            attach(models[2])
            assert_averages(models[2], rank, 0)
            handles[0].detach()
            handles[0] = attach(models[0])  # models[1] still has the group that was destroyed
    references = [reference for model in models for reference in references_to(model)]
    del model, models, handles  # the last owners of both groups
    assert_freed(references)
    open_group(str(tmp_path / "another"), rank, world_size)


# ---- hooks of Python's -----------------------------------------------------------------------------------------------

# PyTorch destroys ours with the first that users put on a parameter after attach.


def _ones(rank: int, step: int) -> Tensor:
    return torch.arange(3) + 10.0 * step + 4.0 * rank  # whose means of two are exact


def _assert_scaled(parameters: list[nn.Parameter], rank: int, step: int, factors: Sequence[int]) -> None:
    """Averages that a hook of each parameter has scaled so."""
    for parameter in parameters:
        parameter.grad = None
    sum((parameter * _ones(rank, step)).sum() for parameter in parameters).backward()
    for parameter, factor in zip(parameters, factors, strict=True):
        assert torch.equal(parameter.grad.float(), factor * (_ones(0, step) + _ones(1, step)) / 2), f"step {step}"


@on_ranks(2)
def test_hooks_put_on_after_attach(rank: int, world_size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    sync = fastsync.attach(parameters)
    _assert_scaled(parameters, rank, 0, [1, 1, 1])
    handle = parameters[1].register_hook(lambda grad: 2 * grad)
    for step in range(1, 5):  # of a new graph each, and so with other accumulators
        _assert_scaled(parameters[1:2], rank, step, [2])
    handle.remove()
    parameters[1].data = parameters[1].data.clone()
    _assert_scaled(parameters, rank, 5, [1, 1, 1])
    # Between forward and backward, on all of them.
    loss = sum((parameter * _ones(rank, 6)).sum() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = None
        parameter.register_hook(lambda grad: 4 * grad)
    loss.backward()
    assert torch.equal(parameters[2].grad, 2 * (_ones(0, 6) + _ones(1, 6)))
    for parameter in parameters:
        parameter.register_hook(lambda grad: grad / 2)
        parameter.data = parameter.data.double()  # which gives it another accumulator
    for step in (7, 8):
        _assert_scaled(parameters[::2], rank, step, [2, 2])
    assert sync.stats().num_steps == 9
    sync.detach()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters[::2])
    for parameter in parameters:
        parameter.grad = None
    sum((parameter * _ones(rank, 9)).sum() for parameter in parameters).backward()
    assert torch.equal(parameters[0].grad, 2 * _ones(rank, 9).double())
    fastsync.attach(parameters)  # anew, where there are Python's hooks already
    _assert_scaled(parameters, rank, 10, [2, 2, 2])


@on_ranks(2)
def test_handles_are_found_by_their_modules(rank: int, world_size: int) -> None:
    model, ddp_model = Mlp(), DistributedDataParallel(Mlp())
    refused(lambda: fastsync.handle_of(model), "no handles of fastsync belong to this Mlp")
    for _ in range(2):
        sync = attach(model)
        assert fastsync.handle_of(model) is fastsync.handle_of(model.layers[0]) is sync
        sync.detach()
        refused(lambda: fastsync.handle_of(model), "no handles")
    hook = fastsync.register_comm_hook(ddp_model)
    assert fastsync.handle_of(ddp_model) is hook
    both = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    handles = [attach(each) for each in both]
    assert [fastsync.handle_of(each) for each in both] == handles
    refused(lambda: fastsync.handle_of(both), "no handles of fastsync belong to this ModuleList")


@on_ranks(1, cases={"is_default": [True, False], "entry_point": [*AVERAGING, "drop-in hook without a state"]})
def test_a_process_group_that_was_destroyed_is_freed(
    rank: int, world_size: int, is_default: bool, entry_point: str
) -> None:
    """Its threads and connections would stay until the process ends."""
    group = None if is_default else dist.new_group([rank])
    if entry_point in AVERAGING:
        given = average(entry_point, Mlp(), group=group)
        given.backward(given.model(batch(rank, 0)).square().mean())
        del given
    else:
        ddp = DistributedDataParallel(Mlp(), process_group=group)
        ddp.register_comm_hook(group, fastsync.fp16_compress_hook)
        ddp(batch(rank, 0)).square().mean().backward()
        del ddp
    alive = weakref.ref(dist.group.WORLD if group is None else group)
    del group
    gc.collect()
    dist.destroy_process_group(None if is_default else alive())
    assert_soon_none(alive)


@on_ranks(1)
def test_ranks_go_through_their_handles_in_one_order(rank: int, world_size: int) -> None:
    """A step may wait for other ranks at each, so the order is that of attaching, and not one of addresses."""
    models = [nn.Linear(1, 1) for _ in range(40)]
    handles = [fastsync.attach(model) for model in models[::-1]]
    assert in_use() == handles
