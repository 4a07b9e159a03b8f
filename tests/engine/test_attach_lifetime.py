"""attach(), and what comes and goes around it: models, handles, process groups, exceptions, the interpreter."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.engine.attached import (
    Fallible,
    assert_averages,
    assert_averages_nothing,
    assert_freed,
    attach,
    backward,
    fail,
    gradients,
    references_to,
)
from tests.models import Mlp, assert_all_bitwise_equal, assert_same_on_all_ranks, grads_of
from tests.ranks import on_ranks, open_group, run_ranks

CHILD_SECONDS = 100  # how long a script may take after its imports


# ---- the model and its handle ---------------------------------------------------------------------------------------


def _model_goes_first(rank: int) -> None:
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


def _handle_is_dropped(rank: int) -> None:
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


def _loose_parameters(rank: int) -> None:
    model = Mlp()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    attach(list(model.parameters()))
    gc.collect()
    assert_averages(model, rank)

    model = Mlp()
    sync = attach(list(model.parameters()))
    references = references_to(model)
    assert_averages(model, rank)
    del model
    gc.collect()
    assert [reference() is None for reference in references] == [True] + [False] * 6
    sync.detach()
    references.append(weakref.ref(sync))
    del sync
    assert_freed(references)


def _detached(rank: int) -> None:
    model = Mlp()
    keys = list(model.state_dict())
    torch.manual_seed(rank)
    frozen = model.layers[0].weight.requires_grad_(False)
    sync = attach(model)
    assert list(model.state_dict()) == keys
    assert not frozen.requires_grad
    frozen.requires_grad_(True)
    for number in range(3):
        assert_averages(model, rank, number)
        handle = weakref.ref(sync)
        sync.detach()
        sync.detach()
        assert_averages_nothing(model, rank, number)
        assert list(model.state_dict()) == keys
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        sync = attach(model)
        assert_freed([handle])


def _mark_of_accumulator(parameter: nn.Parameter) -> object:
    """What is written on the accumulator that the parameter has now; a new one is written on."""
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    return node.metadata.setdefault("mark", object())


def _accumulators_are_not_kept_alive(rank: int) -> None:
    """One remembers the stream that was current when it was made, so each forward has to make its own."""
    model = Mlp()
    attach(model)
    before = [_mark_of_accumulator(parameter) for parameter in model.parameters()]
    assert_averages(model, rank)
    after = [_mark_of_accumulator(parameter) for parameter in model.parameters()]
    assert not set(map(id, before)) & set(map(id, after))
    kept = model.layers[0].weight.view_as(model.layers[0].weight)  # its accumulator serves several backwards
    for number in range(1, 3):
        assert_averages(model, rank, number)
    del kept


def _handle_is_an_attribute(rank: int) -> None:
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
    assert_averages(model, rank, 1)
    attach(copies[0])
    assert_averages(copies[0], rank, 2)
    references = references_to(model)
    del model
    assert_freed(references)
    assert_averages(copies[0], rank, 3)


@on_ranks(2)
def test_models_and_handles_may_go_in_any_order(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    _model_goes_first(rank)
    _handle_is_dropped(rank)
    _loose_parameters(rank)
    _detached(rank)
    _accumulators_are_not_kept_alive(rank)
    _handle_is_an_attribute(rank)


@on_ranks(2)
def test_detach_within_backward_is_refused(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Mlp()
    sync = attach(model)
    assert_averages(model, rank, 0)
    messages = []

    def detach(_: Tensor) -> None:
        try:
            sync.detach()
        except RuntimeError as error:
            messages.append(str(error))

    hook = model.layers[2].weight.register_post_accumulate_grad_hook(detach)
    assert_averages(model, rank, 1)
    hook.remove()
    assert len(messages) == 1
    sync.detach()
    assert_averages_nothing(model, rank, 2)
    attach(model)
    assert_averages(model, rank, 3)


# ---- process groups -------------------------------------------------------------------------------------------------


def _group_goes_first(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(1)
    models = [Mlp() for _ in range(3)]
    handles = [attach(model) for model in models[:2]]
    for number in range(2):
        for model in models[:2]:
            assert_averages(model, rank, number)
        dist.destroy_process_group()
        if number == 0:
            open_group(f"{folder}/store", rank, world_size)
            with pytest.raises(ValueError, match="averaged already, by attach"):
                attach(models[0])
            attach(models[2])
            assert_averages(models[2], rank, 0)
            handles[0].detach()
            handles[0] = attach(models[0])  # models[1] still has the group that was destroyed
    references = [reference for model in models for reference in references_to(model)]
    del model, models, handles  # the last owners of both groups
    assert_freed(references)
    open_group(f"{folder}/another", rank, world_size)


def test_group_destroyed_while_a_model_is_attached(tmp_path: Path) -> None:
    run_ranks(_group_goes_first, 2, str(tmp_path))


# ---- exceptions in backward -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_backward_that_raises_on_all_ranks(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Fallible()
    sync = attach(model)
    fail(model, rank, 0)  # before there are buckets
    for step in range(1, 4):
        assert_averages(model, rank, step)
        for _ in range(step):
            fail(model, rank, step)
        sync.piggyback("step", torch.tensor(float(step + rank)))
    fail(model, rank, 4)
    sync.synchronize()
    assert_same_on_all_ranks(grads_of(model))
    assert sync.piggybacked()["step"].item() == 3.5
    assert_averages(model, rank, 5)
    with sync.no_sync():
        fail(model, rank, 6)
    assert_averages(model, rank, 6)
    fail(model, rank, 7)
    sync.detach()
    assert_averages_nothing(model, rank, 7)
    attach(model)
    assert_averages(model, rank, 8)
    fail(model, rank, 9)
    references = references_to(model)
    del model, sync
    assert_freed(references)


@on_ranks(3)
def test_backward_that_raises_on_one_rank_gives_the_others_nan(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = Fallible()
    sync = attach(model)

    def assert_last_layer_alone_is_averaged(step: int) -> None:
        expected = [sum(grads) / world_size for grads in zip(*_of_all_ranks(model, world_size, step), strict=True)]
        averaged = backward(model, rank, step)
        torch.testing.assert_close(averaged[4:], expected[4:])
        for grad in averaged[:4]:
            assert grad.isnan().all()
        assert sync.grad_stats().num_nonfinite.item() == sum(grad.numel() for grad in averaged[:4])
        assert sync.grad_stats().grad_norm.isnan()

    def assert_averages_of_all(step: int) -> None:
        expected = [sum(grads) / world_size for grads in zip(*_of_all_ranks(model, world_size, step), strict=True)]
        averaged = backward(model, rank, step)
        torch.testing.assert_close(averaged, expected)
        assert_same_on_all_ranks(averaged)

    if rank == 1:
        fail(model, rank, 0)  # before there are buckets
    else:
        assert all(grad.isnan().all() for grad in backward(model, rank, 0))
    assert_averages_of_all(0)
    for step in range(1, 4):
        if rank == 1:
            fail(model, rank, step)
        else:
            assert_last_layer_alone_is_averaged(step)
        assert_averages_of_all(10 + step)
    if rank == 1:
        fail(model, rank, 4)
        sync.detach()  # tells the others
    else:
        assert_last_layer_alone_is_averaged(4)
        sync.detach()
    sync = attach(model)
    assert_averages_of_all(5)


def _of_all_ranks(model: nn.Module, world_size: int, step: int) -> list[list[Tensor]]:
    return [gradients(model, rank, step) for rank in range(world_size)]


# ---- the interpreter ------------------------------------------------------------------------------------------------

_SCRIPT = """
import itertools
import os
import signal
import sys
import torch
import torch.distributed as dist
from torch import nn
import fastsync

folder, seconds, ways = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
children = {}
for way, rank in itertools.product(ways, range(2)):
    if (child := os.fork()) == 0:
        signal.alarm(seconds)  # which ends the child where it hangs
        break  # what follows happens in the child, up to the interpreter's exit
    children[child] = (way, rank)
else:
    statuses = [(children[child], os.waitpid(child, 0)[1]) for child in children]
    assert not any(status for _, status in statuses), statuses
    sys.exit()

dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{way}", 2), rank=rank, world_size=2)
torch.manual_seed(rank)
models = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(2)]
of_module = fastsync.attach(models[0], "fp16", bucket_cap_mb=2**-10)
of_parameters = fastsync.attach(list(models[1].parameters()), "fp16", bucket_cap_mb=2**-10)
for model in models:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
assert of_module.stats().num_steps == of_parameters.stats().num_steps == 3
if way == "destroy":
    dist.destroy_process_group()
"""


def test_scripts_that_exit_with_an_attached_model(tmp_path: Path) -> None:
    """Each rank of each way has an interpreter of its own, forked from one that has only imported."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-X", "faulthandler", str(script), str(tmp_path), str(CHILD_SECONDS), "destroy", "keep"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result


@on_ranks(2)
def test_handles_are_found_by_their_modules(rank: int, world_size: int) -> None:
    model, other = Mlp(), Mlp()
    with pytest.raises(ValueError, match="no handles of fastsync look after this Mlp"):
        fastsync.handle_of(model)
    with pytest.raises(ValueError, match=r"module: expected .*, got NoneType"):
        fastsync.handle_of(None)  # type: ignore[arg-type]
    sync = attach(model)
    assert fastsync.handle_of(model) is sync
    assert fastsync.handle_of(model.layers[0]) is sync
    ddp_model = DistributedDataParallel(other)
    hook = fastsync.register_comm_hook(ddp_model)
    assert fastsync.handle_of(ddp_model) is hook
    sync.detach()
    with pytest.raises(ValueError, match="no handles"):
        fastsync.handle_of(model)
    again = attach(model)
    assert fastsync.handle_of(model) is again
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    both = nn.ModuleList([first, second])
    of_first, of_second = attach(first), attach(second)
    assert (fastsync.handle_of(first), fastsync.handle_of(second)) == (of_first, of_second)
    with pytest.raises(ValueError, match="no handles of fastsync look after this ModuleList"):
        fastsync.handle_of(both)
