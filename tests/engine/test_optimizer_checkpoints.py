"""``torch.distributed.checkpoint`` with ``shard_optimizer``: each tensor is written once, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.same_data import same_data_is_meant
from tests.engine.sharded_trainings import BOTH_WAYS, same, values
from tests.ranks import on_ranks
from tests.refused import refused

Training = tuple[nn.Module, Optimizer, GradientSynchronizer]


def training(kind: str, dtype: torch.dtype = torch.float32, group: Any = None) -> Training:
    same_data_is_meant()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 70), nn.ReLU(), nn.Linear(70, 3)).to(dtype)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    sync = fastsync.attach(model, process_group=group)
    if kind != "each its own":
        options = {"shared": {}, "masters": {"master_weights": True}, "sent in bf16": {"parameter_compression": "bf16"}}
        fastsync.shard_optimizer(sync, optimizer, **options[kind])
    return model, optimizer, sync


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Takes a step with the same data on every rank, so that a single one can go on alike."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    model(inputs.to(model[0].weight.dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(model: nn.Module, optimizer: Optimizer, path: Path, **options: Any) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def saved_and_ended(kind: str, dtype: torch.dtype, path: Path) -> list[Tensor]:
    """Saves a training after two steps. Returns its weights after two more."""
    model, optimizer, sync = training(kind, dtype)
    for number in range(4):
        if number == 2:
            save(model, optimizer, path)
        step(model, optimizer, number)
    end = values(model)
    sync.detach()
    return end


@on_ranks(3, cases=BOTH_WAYS | {"kind": ["shared", "masters"]})
def test_ranks_write_each_tensor_once(
    rank: int, world_size: int, shared_memory: bool, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind} {shared_memory}"
    saved_and_ended(kind, torch.bfloat16, path)
    metadata = FileSystemReader(path).read_metadata()
    num_bytes = [0] * world_size
    for index, stored in metadata.storage_data.items():
        writer = int(stored.relative_path.removeprefix("__").partition("_")[0])
        tensor = metadata.state_dict_metadata[index.fqn]
        if hasattr(tensor, "size"):
            num_bytes[writer] += tensor.size.numel() * tensor.properties.dtype.itemsize
    assert len(metadata.storage_data) == len(metadata.state_dict_metadata)
    per_value = 2 + 3 * 4 if kind == "masters" else 3 * 2
    assert sum(num_bytes) == 633 * per_value + 4 * 4  # and four counts of steps
    assert max(num_bytes) - min(num_bytes) <= 70 * 5 * 4, num_bytes


KINDS = [
    ("shared", "shared", torch.float32, 1), ("shared", "each its own", torch.float32, 0),
    ("each its own", "shared", torch.float32, 1), ("masters", "masters", torch.bfloat16, 0),
    ("masters", "masters", torch.bfloat16, 1), ("sent in bf16", "sent in bf16", torch.float32, 1),
]  # fmt: skip


@on_ranks(3, cases=BOTH_WAYS | {"of, into, dtype, num_before": KINDS})
def test_trainings_go_on_alike(
    rank: int, world_size: int, shared_memory: bool, of: str, into: str, dtype: Any, num_before: int, tmp_path: Path
) -> None:
    path = tmp_path / f"{of} {into} {num_before} {shared_memory}"
    go_on(lambda: training(into, dtype), saved_and_ended(of, dtype, path), num_before, path)


@on_ranks(2, cases=BOTH_WAYS | {"kind, dtype": [("shared", torch.float32), ("masters", torch.bfloat16)]})
def test_a_single_rank_goes_on_alike(
    rank: int, world_size: int, shared_memory: bool, kind: str, dtype: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"{kind} {shared_memory}"
    end = saved_and_ended(kind, dtype, path)
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    go_on(lambda: training(kind, dtype, alone), end, 0, path, no_dist=True)


def go_on(make: Callable[[], Training], end: list[Tensor], num_before: int, path: Path, **options: Any) -> None:
    model, optimizer, _ = make()
    for number in range(num_before):
        step(model, optimizer, 9 + number)
    load(model, optimizer, path, **options)
    for number in range(2, 4):
        step(model, optimizer, number)
    same(values(model), end)


@on_ranks(2, cases=BOTH_WAYS)
def test_masters_begin_from_a_checkpoint_without_them(
    rank: int, world_size: int, shared_memory: bool, tmp_path: Path
) -> None:
    path = tmp_path / str(shared_memory)
    saved_and_ended("each its own", torch.bfloat16, path)
    model, optimizer, _ = training("masters", torch.bfloat16)
    refused(lambda: load(model, optimizer, path), "Missing key in checkpoint state_dict", kind=CheckpointException)
    load(model, optimizer, path, planner=DefaultLoadPlanner(allow_partial_load=True))
    loaded, moment = values(model), optimizer.state[model[0].weight]["exp_avg"].clone()
    assert moment.any()
    same(moment, moment.bfloat16().float())
    dist.barrier()
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    step(model, optimizer, 2)
    state = optimizer.state_dict()["state"].values()
    same([each["master"] for each in state], [value.float() for value in loaded])
    without_masters, own, _ = training("each its own", torch.bfloat16)
    save(model, optimizer, path / "with masters")
    load(without_masters, own, path / "with masters")
    assert own.state[without_masters[0].weight]["exp_avg"].any()
    step(without_masters, own, 2)
