"""Models under fully_shard: what the engine's reduce-scatter gives, against one process that holds all data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from fastsync.sync.compression import Wire
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.sharded import (
    LIMITS,
    STEPS,
    Tied,
    batch_of,
    distance,
    full,
    loss_of,
    sharded,
    step_of,
    train,
    trained_alone,
)
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks, run_ranks
from tests.refused import refused

WIRES: list[Wire] = ["none", "fp16", "bf16", "int8"]


# ---- the same bits as the reference ---------------------------------------------------------------------------------


def _as_the_reference(rank: int, world_size: int, device: str) -> None:
    cases = [*itertools.product(WIRES, (torch.float32, torch.float64, torch.bfloat16), (5, 1000))]
    several_pieces = [(wire, torch.float32, 300_001) for wire in ("none", "int8")] if world_size == 2 else []
    for wire, dtype, shard in cases + several_pieces:
        feedback = wire != "none"
        numel = shard * world_size
        engine = _C.ShardedState(dist.group.WORLD)
        choice = Compression(wire, reduce="fp32", error_feedback=feedback)
        engine.set_compressions(in_engine([Candidate(choice)]))
        identity = torch.empty(numel, dtype=dtype, device="meta")
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        residuals = [torch.zeros(numel, dtype=sums) for _ in range(world_size)] if feedback else None
        for step, factor in enumerate((None, 1.0, 0.3)):
            generators = [torch.Generator().manual_seed(10 * step + other) for other in range(world_size)]
            inputs = [torch.randn(numel, generator=generator).to(dtype) for generator in generators]
            op = [dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.3)][step]
            output = torch.empty(shard, dtype=dtype, device=device)
            engine.reduce_scatter(identity, "all of them", output, inputs[rank].to(device), op)
            expected = reference.reduce_scatter(inputs, reference.WIRE_DTYPE[wire], factor=factor, residuals=residuals)
            what = f"{wire}, {dtype}, {shard} values, step {step}"
            assert_bitwise_equal(output.cpu(), expected[rank], what)
            squares = expected[rank].double().square().sum().item()
            assert engine.grad_stats()[reference.SUM_OF_SQUARES].item() == pytest.approx(squares, rel=1e-6), what


@pytest.mark.parametrize(("world_size", "shared_memory"), [(1, True), (2, True), (2, False), (3, True), (3, False)])
def test_a_shard_is_the_references_to_the_bit(world_size: int, shared_memory: bool) -> None:
    run_ranks(_as_the_reference, world_size, "cpu", shared_memory=shared_memory)


@on_ranks(2)
def test_a_shard_by_torchs_own_operations_is_the_references_to_the_bit(rank: int, world_size: int) -> None:
    os.environ["FASTSYNC_KERNELS"] = "aten"
    assert _C.kernels("cpu") == "generic"
    _as_the_reference(rank, world_size, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_shard_on_gpus_is_the_references_to_the_bit(world_size: int) -> None:
    run_ranks(_as_the_reference, world_size, "cuda", backend="nccl")


@on_ranks(2, cases={"shared_memory": [True, False]})
def test_the_scale_follows_the_shards_of_all_ranks(rank: int, world_size: int) -> None:
    """Nor is any pass made over the gradients for it, after the first step. Rank 0's shard tells nothing.

    By messages, ranks tell each other the scale while they go on. A profiler that ends then corrupts PyTorch's memory:
    a thread of Gloo still writes its record.
    """
    may_profile = os.environ["FASTSYNC_SHARED_MEMORY"] == "1"
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression("fp16"))]))
    identity, output = torch.empty(600, device="meta"), torch.empty(300)
    for step, magnitude in enumerate((1.0, 1.0, 4.0, 16.0, 2.0**-8, 2.0**-8, 4.0, 2.0**20)):
        inputs = [torch.cat([torch.zeros(300), magnitude * (other + torch.linspace(1, 2, 300))]) for other in range(2)]
        with profile(activities=[ProfilerActivity.CPU]) if may_profile else nullcontext() as profiler:
            engine.reduce_scatter(identity, "all of them", output, inputs[rank], dist.ReduceOp.AVG)
        if profiler is not None:
            is_measured = any(event.name == "aten::isfinite" for event in profiler.events())
            assert is_measured == (step == 0)
        mean = (inputs[0] + inputs[1])[300 * rank :][:300] / 2
        num_saturated = torch.tensor(engine.grad_stats()[reference.NUM_SATURATED].item())
        dist.all_reduce(num_saturated)
        jumps = magnitude == 2.0**20
        assert (num_saturated > 0) == jumps
        if not jumps:
            torch.testing.assert_close(output, mean, rtol=2.0**-9, atol=0)


# ---- trainings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, False), (4, True)])
@on_ranks(parametrized=("shared_memory",))
def test_trains_as_one_process_with_all_data(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    alone = trained_alone()
    for wire in WIRES:
        model = sharded(mesh)
        handle = fastsync.register_fsdp(model, gradients=Compression(wire, error_feedback=wire == "int8"))
        train(model, rank, world_size)
        assert distance(model, alone) <= LIMITS[wire], wire
        stats = handle.stats()
        assert stats.num_steps == STEPS
        assert stats.num_syncs == 3 * STEPS
        assert all(block.unused.grad is None and block.frozen.grad is None for block in model.blocks)
        assert_bitwise_equal(full(model.head.weight), full(model.embedding.weight))


@on_ranks(4, shared_memory=False)
def test_trains_in_replicas_as_one_process_with_all_data(rank: int, world_size: int) -> None:
    """HSDP of two replicas: fully_shard's own, and with an all-reduce of the engine's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone = trained_alone()
    for wire in ("none", "bf16", "int8"):
        compression = Compression(wire, reduce="fp32", error_feedback=wire == "int8")
        model = sharded(mesh)
        fastsync.register_fsdp(model, gradients=compression)
        train(model, rank, world_size)
        assert distance(model, alone) <= LIMITS[wire], wire
        model = sharded(mesh["shard"])
        inside = compression if wire == "bf16" else "pytorch"
        options: dict[str, Any] = {"gradients": inside, "process_group": mesh["replicate"]}
        handle = fastsync.register_fsdp(model, replicas=compression, **options)
        train(model, rank, world_size)
        assert distance(model, alone) <= LIMITS[wire], wire
        stats = handle.stats()
        parts = [part for part in (stats.gradients, stats.replicas) if part is not None]
        assert [part.num_syncs for part in parts] == [3 * STEPS] * (2 if wire == "bf16" else 1)
        assert stats.num_syncs == sum(part.num_syncs for part in parts)
        assert (stats.num_steps, len(stats.buckets)) == (STEPS, 3 * len(parts))
        assert_same_on_all_ranks([full(parameter).detach() for parameter in model.parameters()])


@on_ranks(2)
def test_replicas_that_are_not_sharded(rank: int, world_size: int) -> None:
    module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "alone"))
    model = Tied()
    for part in (*model.blocks, model):
        module.replicate(part, mesh=mesh["alone"])
    refused(lambda: fastsync.register_fsdp(model), "is replicated and not sharded")
    fastsync.register_fsdp(model, replicas="fp16", process_group=mesh["replicate"])
    train(model, rank, world_size)
    assert distance(model, trained_alone()) <= LIMITS["fp16"]


@on_ranks(4, cases={"is_sharded": [True, False]})
def test_trains_beside_tensor_parallelism(rank: int, world_size: int, is_sharded: bool) -> None:
    """Shards of the tensors' parts, and whole replicas of them."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "alone", "tensor"))
    model = Tied()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    for call in (fastsync.attach, fastsync.all_reduce_gradients):
        refused(lambda: call(model, process_group=mesh["data"]), "data-parallel dimension")
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data" if is_sharded else "alone"])
    if is_sharded:
        handle = fastsync.register_fsdp(model, gradients="bf16")
    else:
        options: dict[str, Any] = {"gradients": "pytorch", "process_group": mesh["data"]}
        handle = fastsync.register_fsdp(model, replicas="bf16", **options)
    train(model, mesh.get_local_rank("data"), 2)
    assert handle.stats().num_syncs == 3 * STEPS
    assert distance(model, trained_alone()) <= LIMITS["bf16"]


# Between two ranks a sum of float32 values is the same whoever adds, and its half is exact.
POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    MixedPrecisionPolicy(reduce_dtype=torch.float16),
    MixedPrecisionPolicy(reduce_dtype=torch.float64),
]


@on_ranks(2)
def test_full_width_between_two_ranks_is_what_fully_shard_does_by_itself(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))

    def compare(what: str, micro_batches: int = 1, change: Callable[[Any], None] = lambda _: None, **opts: Any) -> None:
        models = [sharded(mesh, **opts) for _ in range(2)]
        fastsync.register_fsdp(models[0], gradients="none")
        for model in models:
            change(model)
            train(model, rank, world_size, steps=3, micro_batches=micro_batches)
        for index, pair in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            mine, theirs = (parameter.to_local() for parameter in pair)
            assert_bitwise_equal(mine, theirs, f"{what}, parameter {index}")

    for policy in POLICIES:
        compare(f"{policy}", mp_policy=policy)
        compare(f"{policy} with micro-batches", micro_batches=2, mp_policy=policy)
    compare("checkpointed", checkpointed=True)
    compare("kept whole after forward", reshard_after_forward=False)
    compare("sums", change=lambda model: model.set_force_sum_reduction_for_comms(True))


@on_ranks(2)
def test_a_divide_factor_of_the_users(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = sharded(mesh)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(4.0)  # which Gloo's own reduce-scatter does not take
    handle = fastsync.register_fsdp(model, gradients="none")
    assert fastsync.handle_of(model) is handle
    step_of(model, 0, rank, world_size)
    alone = Tied()
    loss_of(alone, *batch_of(0)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad * (world_size / 4.0))
