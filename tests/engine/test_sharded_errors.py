"""Models under fully_shard: ranks that are lost or disagree, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import _C, Compression
from fastsync.autotune.choose import Candidate, in_engine
from tests.engine.sharded import Tied, batch_of, loss_of, sharded, step_of
from tests.ranks import on_ranks
from tests.refused import refused

# ---- ranks that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_that_send_others_are_noticed_in_shared_memory(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression("bf16", reduce="fp32"))]))
    whole = [torch.empty(numel * world_size, device="meta") for numel in (64, 512, 512)]

    def send(index: int) -> Tensor:
        numel = whole[index].numel()
        output = torch.empty(numel // world_size)
        engine.reduce_scatter(whole[index], f"part {index}", output, torch.ones(numel), dist.ReduceOp.AVG)
        return output

    for step in range(2):
        assert all(send(index).eq(1).all() for index in range(3)), step
    with pytest.raises(
        RuntimeError, match=r"averaging part \d failed on rank(.|\n)*rank \d has (sent other gradients|fai)"
    ):
        send(1 if rank == world_size - 1 else 0 if world_size == 2 else 2)


# ---- what is refused ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_values_that_do_not_fit_are_refused(rank: int, world_size: int) -> None:
    engine = _C.ShardedState(dist.group.WORLD)
    engine.set_compressions(in_engine([Candidate(Compression("none"))]))

    def send(numel: int, of_output: int, op: Any) -> None:
        identity = torch.empty(numel, device="meta")
        engine.reduce_scatter(identity, "part", torch.empty(of_output), torch.ones(numel), op)

    refused(lambda: send(5, 3, dist.ReduceOp.SUM), "input:")
    refused(lambda: send(6, 3, dist.ReduceOp.MAX), "takes AVG, SUM and PREMUL_SUM with a number,")
    refused(lambda: send(6 + 2 * rank, 3 + rank, dist.ReduceOp.SUM), "rank 0: part with 6 values of Float")

    def send_of(dtype: torch.dtype) -> None:
        values = torch.ones(6, dtype=dtype)
        engine.reduce_scatter(torch.empty(6, device="meta"), "part", values[:3].clone(), values, dist.ReduceOp.SUM)

    refused(lambda: send_of(torch.int32 if rank else torch.float32), "rank 0: part with 6 values of Float; rank 1:")
    refused(lambda: send_of(torch.int32), "part has Int gradients; fastsync handles float32")


@on_ranks(2, cases={"way": ["reduce-scatter", "all-reduce"]})
def test_what_is_sharded_afterwards_is_refused(rank: int, world_size: int, way: str) -> None:
    """Else the root's parameters would go past the engine, and by the hook they would drift apart."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    over = {"mesh": mesh["replicate" if way == "reduce-scatter" else "shard"]}

    def register(model: Any) -> None:
        if way == "reduce-scatter":
            fastsync.register_fsdp(model)
        else:
            fastsync.register_fsdp(model, process_group=mesh["replicate"])

    for is_late in (True, False):
        model = Tied()
        for block in model.blocks:
            fully_shard(block, **over)
        if is_late:
            register(model)
        else:
            register(model.blocks)
        fully_shard(model, **over)
        if not is_late:
            register(model) if way == "reduce-scatter" else model.set_all_reduce_hook(lambda values: None)
        loss = loss_of(model, *(each[rank::2] for each in batch_of(0)))
        if is_late:
            refused(lambda: loss.backward(), "the model itself went through fully_shard after", kind=RuntimeError)
        else:
            loss.backward()


class Foreign:
    """A reduce-scatter of somebody else's."""

    def allocate(self, size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)


@on_ranks(4)
def test_what_cannot_be_served_is_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    register = fastsync.register_fsdp
    refused(lambda: register(3), "expected a model that went through fully_shard,")
    refused(lambda: register(Tied()), "no module of this Tied went through fully_shard")
    refused(lambda: register(DistributedDataParallel(Tied())), "use fastsync.register_comm_hook for a model in")
    model = sharded(mesh)
    two_shot, levels = Compression("bf16", reduce="fp32", algorithm="two_shot"), Compression("bf16", ranks_per_node=2)
    for compression in ("auto", two_shot, levels, "fp8"):
        refused(lambda: register(model, gradients=compression), "gradients:")
    register(model.blocks[0])
    register(model)
    for argument, options in (("gradients", {"parameters": "pytorch"}), ("parameters", {"gradients": "pytorch"})):
        refused(lambda: register(model, **options), f"{argument}:")
    foreign = sharded(mesh)
    foreign.blocks[1].set_custom_reduce_scatter(Foreign())
    refused(lambda: register(foreign), "module 'blocks.1' has another reduce-scatter")
    register(foreign, gradients="pytorch")
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = Tied()
    fully_shard(mixed.blocks[0], mesh=pair["shard"])
    fully_shard(mixed, mesh=mesh)
    refused(lambda: register(mixed), "sharded over several process groups")
    register(mixed.blocks[0])
    register(mixed)

    hook = fastsync.register_fsdp
    refused(lambda: hook(sharded(pair), process_group=pair["replicate"]), "averages over replicas itself")
    refused(lambda: hook(sharded(mesh), process_group=mesh), "ranks [0, 1, 2, 3] of one replica")
    served = sharded(pair["shard"])
    hook(served, process_group=pair["replicate"])
    refused(lambda: hook(served, process_group=pair["replicate"]), "has an all-reduce hook already")
    dist.barrier()


@on_ranks(4)
def test_ranks_that_disagree_are_told(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"rank 0: compression bf16, fp32 sums; rank 1: compression none, fp32 sums"):
        fastsync.register_fsdp(sharded(mesh), gradients="none" if rank % 2 else "bf16")
    with pytest.raises(ValueError, match=r"do not agree on .*rank 1: all-gather, compression none"):
        fastsync.register_fsdp(sharded(mesh), gradients="pytorch" if rank % 2 else "none")
    model = sharded(mesh["shard"])
    handle = fastsync.register_fsdp(model, gradients="bf16")
    handle.compression.gradients = "int8" if rank % 2 else "none"
    refused(lambda: step_of(model, 0, rank, world_size), ": rank 1: compression int8,")


@on_ranks(2)
def test_errors_name_the_argument(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    model, replicas = sharded(mesh["shard"]), mesh["replicate"]
    wrong: list[tuple[str, dict[str, Any]]] = [
        *((name, {name: given}) for name in ("gradients", "parameters", "replicas") for given in (None, "fp32", 3)),
        ("parameters", {"parameters": "int8+ef"}),
        ("replicas", {"replicas": "pytorch"}),
        ("process_group", {"replicas": "bf16"}),
        ("process_group", {"process_group": "all"}),
        ("gradients", {"gradients": "pytorch", "parameters": "pytorch"}),
    ]
    for argument, options in wrong:
        refused(lambda: fastsync.register_fsdp(model, **options), f"{argument}:")
    handle = fastsync.register_fsdp(model, gradients="pytorch", process_group=replicas)
    compression = handle.compression
    assert (compression.gradients, compression.parameters) == (None, Compression())
    assert compression.replicas == Compression()
    for argument, given in (("gradients", "bf16"), ("parameters", None), ("replicas", "fp32")):
        refused(lambda: setattr(compression, argument, given), f"{argument}:")
    with pytest.raises(ValueError, match=r"^compression: .*\.compression\.replicas"):
        handle.compression = "int8"
    refused(lambda: handle.load_state_dict({"residuals": {}}), "state_dict:")
