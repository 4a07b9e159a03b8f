"""The handles of models under fully_shard: norms, statistics, state, and a model that is given back."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import fastsync
from fastsync import Compression
from fastsync.sync.fsdp import ShardedHandle
from tests.bitwise import assert_bitwise_equal
from tests.engine.sharded import full, sharded, step_of
from tests.ranks import on_ranks
from tests.refused import refused


@on_ranks(2)
def test_a_model_is_given_back(rank: int, world_size: int) -> None:
    """The model is PyTorch's again, as in the step before, and may be registered anew: also in another group."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("shard", "replicate"))
    register: list[Callable[[nn.Module], ShardedHandle]] = [
        lambda model: fastsync.register_fsdp(model, gradients="int8"),
        lambda model: fastsync.register_fsdp(model, replicas="int8", process_group=mesh["replicate"]),
    ]

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        step_of(model, 0, rank, world_size)
        return [p.grad.to_local() for p in model.parameters() if p.grad is not None]

    for one in register:
        model = sharded(mesh["shard"])
        expected = gradients(model)
        handle = one(model)
        gradients(model)
        handle.detach()
        refused(lambda: fastsync.handle_of(model), "no handles of fastsync belong to")
        for mine, theirs in zip(gradients(model), expected, strict=True):
            assert_bitwise_equal(mine, theirs)
        assert handle.stats().num_steps == 1
        handle = one(model)
        gradients(model)
        assert handle.stats().num_steps == 1


@on_ranks(2)
def test_a_reduce_scatter_that_took_its_place_stays(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    first, second = (block._get_fsdp_state()._fsdp_param_groups[0] for block in model.blocks)
    handle = fastsync.register_fsdp(model)
    foreign = object()
    model.blocks[0].set_custom_reduce_scatter(foreign)
    handle.detach()
    assert first._reduce_scatter_comm is foreign
    assert type(second._reduce_scatter_comm).__name__ == "DefaultReduceScatter"
    assert {type(each._all_gather_comm).__name__ for each in (first, second)} == {"DefaultAllGather"}


# ---- clipping and statistics -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_norm_of_all_shards_is_torch_s_to_find(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    handle = fastsync.register_fsdp(model)
    step_of(model, 0, rank, world_size)
    refused(lambda: fastsync.clip_grad_norm_(handle, 0.01), "got ShardedHandle; for parameters and models")
    expected = torch.cat([full(p.grad).flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert handle.grad_stats().grad_norm < expected  # of this rank's shards


@on_ranks(2)
def test_statistics_and_another_compression(rank: int, world_size: int) -> None:
    model = sharded(init_device_mesh("cpu", (world_size,)))
    handle = fastsync.register_fsdp(model, gradients="bf16")
    for step in range(2):
        handle.compression.gradients = ("bf16", "int8")[step]
        step_of(model, step, rank, world_size)
        stats = handle.stats()
        assert stats.num_steps == step + 1
        assert len(stats.buckets) == 3
        assert stats.transport == "shared_memory"
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad) - 2 * 15
        assert trained <= stats.numel <= trained + 5 * 64  # rows are padded
    assert "int8, fp32 sums" in repr(handle.explain())
    assert "ShardedHandle(3 modules, 2 ranks, gradients='int8, fp32 sums', parameters=" in repr(handle)
    before = handle.stats().wire_bytes
    handle.compression.gradients = "none"
    step_of(model, 2, rank, world_size)
    assert handle.stats().wire_bytes - before >= 4 * trained // world_size
    assert str(handle.compression.gradients) == "none, fp32 sums"


# ---- state ----------------------------------------------------------------------------------------------------------


@on_ranks(2, cases={"compression": [Compression("int8", error_feedback=True), "fp16"]})
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    rank: int, world_size: int, compression: Any, tmp_path: Path
) -> None:
    folder = tmp_path / str(compression)
    folder.mkdir(exist_ok=True)
    mesh = init_device_mesh("cpu", (world_size,))

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, ShardedHandle]:
        model = sharded(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, fastsync.register_fsdp(model, gradients=compression)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            step_of(model, step, rank, world_size)
            optimizer.step()

    model, optimizer, handle = begin()
    go_on(model, optimizer, range(4))
    torch.save(handle.state_dict(), saved := io.BytesIO())
    torch.save(handle.state_dict(), folder / f"{rank}.pt")
    dcp.save({"model": model.state_dict(), f"fastsync {rank}": saved.getvalue()}, checkpoint_id=folder / "shards")
    state = handle.state_dict()
    assert state["step"] == 4
    assert state["scales"] == {}  # each sum begins with one of its own
    residuals = state["residuals"]
    assert len(residuals) == (0 if compression == "fp16" else 3)
    assert all(key.endswith(f" of rank {rank}") and kept.count_nonzero() for key, kept in residuals.items())
    go_on(model, optimizer, range(4, 8))

    resumed, optimizer, handle = begin()
    loaded = {"model": resumed.state_dict(), f"fastsync {rank}": b""}
    dcp.load(loaded, checkpoint_id=folder / "shards")
    if residuals:
        with pytest.raises(ValueError, match=f"no parameter named .* of rank {1 - rank}'"):
            handle.load_state_dict(torch.load(folder / f"{1 - rank}.pt"))
    handle.load_state_dict(torch.load(io.BytesIO(loaded[f"fastsync {rank}"])))
    go_on(resumed, optimizer, range(4, 8))
    for index, (one, other) in enumerate(zip(resumed.parameters(), model.parameters(), strict=True)):
        assert_bitwise_equal(one.to_local(), other.to_local(), f"parameter {index}")


@on_ranks(2)
def test_the_scales_of_a_hook_go_on(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    states = []
    for _ in range(2):
        model = sharded(mesh["shard"])
        handle = fastsync.register_fsdp(model, gradients="pytorch", replicas="fp16", process_group=mesh["replicate"])
        if states:
            state = {name: part for name, part in states[0].items() if name != "residuals"}
            handle.load_state_dict(state)
            assert handle.state_dict()["scales"] == states[0]["scales"]
        else:
            step_of(model, 0, rank, world_size)
            states.append(handle.state_dict())
            assert states[0]["scales"]
    step_of(model, 1, rank, world_size)


@on_ranks(2)
def test_the_state_has_both_ways_of_a_gradient(rank: int, world_size: int) -> None:
    """A shard over one rank has as many values on both ways, so only the names tell them apart."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def begin() -> tuple[nn.Module, ShardedHandle]:
        model = sharded(mesh["shard"])
        options: dict[str, Any] = {"gradients": "int8+ef", "process_group": mesh["replicate"]}
        return model, fastsync.register_fsdp(model, replicas="int8+ef", **options)

    def gradients(model: nn.Module, step: int) -> list[Tensor]:
        model.zero_grad()
        step_of(model, step, rank, world_size)
        return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]

    model, handle = begin()
    gradients(model, 0)
    state = handle.state_dict()
    between = [name for name in state["residuals"] if name.startswith("replicas: ")]
    assert len(between) == 3
    resumed, of_resumed = begin()
    of_resumed.load_state_dict(state)
    assert of_resumed.state_dict()["step"] == 1
    for one, other in zip(gradients(resumed, 1), gradients(model, 1), strict=True):
        assert_bitwise_equal(one, other)
    alone = sharded(mesh["shard"])
    refused(lambda: fastsync.register_fsdp(alone, gradients="pytorch").load_state_dict(state), "left to PyTorch here")
