"""torch's private names are all there, and what the package says about objects of torch by them is right."""

from __future__ import annotations

import importlib
import inspect
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastsync import _C
from fastsync import _torch_compat as compat
from fastsync._torch_compat import PRIVATE, Private
from fastsync.distributed import gloo_group
from tests.ranks import on_ranks

NEWEST_READ = (2, 14)


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


TORCH = version_of(torch.__version__)


def is_there(name: str) -> bool:
    """Whether torch has the name: it leads to an object, or the class or module says it of its objects."""
    parts = name.split(".")
    owner = importlib.import_module("torch")
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        parts = parts[count:]
        break
    for part in parts[:-1]:
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    if hasattr(owner, parts[-1]):
        return True
    try:
        return re.search(rf"\b{parts[-1]}\b", inspect.getsource(owner)) is not None
    except (TypeError, OSError):  # the class is one of C++, or an alias
        return False


def lacking(names: tuple[Private, ...]) -> list[str]:
    """Lists those that the installed torch lacks. One newer than those read should have the names of the last."""
    version = min(TORCH, NEWEST_READ)
    expected = [each for each in names if version_of(each.first) <= version <= version_of(each.last)]
    return [each.name for each in expected if not is_there(each.name)]


def test_torch_has_every_private_name_that_is_used() -> None:
    assert lacking(PRIVATE) == []


def test_a_name_that_torch_lacks_is_named() -> None:
    gone = (
        Private("torch.distributed.distributed_c10d._get_default_stores"),
        Private("torch.nn.parallel.DistributedDataParallel._hooks_of_comm"),
        Private("torch.distributed.ProcessGroup._rename"),
        Private("torch.distributed.of_old._default"),
    )
    assert lacking((*PRIVATE, *gone)) == [each.name for each in gone]


@on_ranks(1)
def test_what_is_said_of_a_ddp_model(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    ddp_model = DistributedDataParallel(model)
    in_reducers = _C.are_in_reducers([*model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, is_in in zip(names, in_reducers, strict=True) if not is_in] == ["0.bias"]
    assert not any(map(compat.is_in_python_reducer, model.parameters()))
    assert [*compat.names_ignored_by_ddp(model)] == ["0.bias"]
    assert not compat.has_comm_hook(ddp_model)
    ddp_model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    assert compat.has_comm_hook(ddp_model)
    assert not compat.has_python_reducer(ddp_model)
    assert not compat.delays_parameters(ddp_model)


@on_ranks(1)
def test_what_is_said_of_sharded_models(rank: int, world_size: int) -> None:
    inner = nn.Linear(2, 1)
    model = nn.Sequential(nn.Linear(2, 2), inner)
    fully_shard(inner)
    assert [compat.is_fully_sharded(each) for each in model.modules()] == [False, False, True]
    (group,) = compat.fsdp_groups_of(inner)
    assert dist.get_process_group_ranks(compat.scattering_group(group)) == [0]
    assert compat.is_default_of_fsdp(compat.reduce_scatter_of(group))
    assert compat.is_default_of_fsdp(compat.all_gather_of(group))
    assert not compat.has_all_reduce_hook(group)
    inner.set_all_reduce_hook(lambda gradients: None)
    assert compat.has_all_reduce_hook(group)
    flat = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
    assert [compat.is_flat(each) for each in flat.parameters()] == [True]
    assert not compat.is_flat(model[0].weight)


@on_ranks(1)
def test_what_is_said_of_groups(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    assert compat.known_ranks(dist.group.WORLD) == {0}
    unlisted = gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=10), "alone")
    assert (compat.known_ranks(unlisted), unlisted.group_name) == (set(), "alone")
    compat.default_store().set("said", "here")
    assert compat.default_store().get("said") == b"here"


def test_what_is_said_of_modules() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert {*compat.own_parameters(module)} == {"weight", "bias"}
    assert {name: compat.is_saved(module, name) for name in compat.own_buffers(module)} == {
        "running_mean": True, "running_var": True, "num_batches_tracked": True, "passing": False,
    }  # fmt: skip
    assert [*compat.own_modules(nn.Sequential(module)).values()] == [module]
    assert not compat.has_own_call(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert compat.has_own_call(module)
    compiled = torch.compile(module)
    assert getattr(compiled, compat.COMPILED) is module


def test_a_write_that_autograd_does_not_see() -> None:
    tensor = torch.zeros(1)
    with compat.unseen_by_autograd([tensor]):
        tensor.add_(1)
    assert (tensor.item(), tensor._version) == (1, 0)


def test_the_thread_that_runs_a_backward_is_told() -> None:
    told: list[bool] = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: told.append(compat.is_in_backward()))
    weight.sum().backward()
    assert (told, compat.is_in_backward()) == ([True], False)


def test_what_is_said_of_optimizers() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    adam, lbfgs = torch.optim.Adam(weights, fused=True), torch.optim.LBFGS(weights)
    assert (compat.takes_grad_scale(adam), compat.takes_grad_scale(lbfgs)) == (True, False)
    torch.optim.lr_scheduler.ConstantLR(adam)
    assert (compat.has_scheduler(adam), compat.has_scheduler(lbfgs)) == (True, False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert compat.scale_of_scaler(scaler) is None
    adam.zero_grad()
    scaler.scale(weights[0].sum()).backward()
    scaler.unscale_(adam)
    assert [*compat.states_of_scaler(scaler)] == [id(adam)]
    assert compat.scale_of_scaler(scaler) == 8.0
