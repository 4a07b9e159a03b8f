"""Two levels: at full width inside a node, in the wire's format between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from fastsync.compression import AnyCompression
from tests import reference
from tests.models import (
    Given,
    assert_all_bitwise_equal,
    batch,
    grads_of,
    random_grads,
)
from tests.ranks import on_ranks

WIRES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8, "int4": torch.int8}
# Neither divides by the number of ranks, nor by that of values in a block.
SHAPES = [(37, 11), (3,), (1,), (700,)]


def hooked(model: nn.Module, compression: AnyCompression, **options: Any) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(model)
    return ddp, fastsync.register_comm_hook(ddp, compression, **options)


def attached(model: nn.Module, compression: AnyCompression, **options: Any) -> tuple[nn.Module, Any]:
    return model, fastsync.attach(model, compression, **options)


EntryPoint = Callable[..., tuple[nn.Module, Any]]
ENTRY_POINTS: dict[str, EntryPoint] = {"hook": hooked, "attach": attached}


def averaged(
    entry_point: EntryPoint, grads: Sequence[Tensor], compression: AnyCompression, **options: Any
) -> list[Tensor]:
    model, _ = entry_point(Given(grads), compression, **options)
    model(grads).backward()
    return grads_of(model)


def of_all_ranks(world_size: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[Tensor]]:
    return [random_grads(rank, 0, shapes, dtype) for rank in range(world_size)]


# ---- values ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_within_one_node_nothing_is_compressed(rank: int, world_size: int) -> None:
    ranks = of_all_ranks(world_size, SHAPES, torch.float32)
    expected = reference.all_reduce_mean(ranks, reduce="fp32", algorithm="two_shot")
    for entry_point in ENTRY_POINTS.values():
        got = averaged(entry_point, ranks[rank], Compression("int8", error_feedback=True, ranks_per_node=world_size))
        assert_all_bitwise_equal(got, expected, "gradient")


# ---- error feedback -------------------------------------------------------------------------------------------------


def _step(model: nn.Module, rank: int, number: int) -> list[Tensor]:
    model.zero_grad()
    model(batch(rank, number)).square().mean().backward()
    return [grad.clone() for grad in grads_of(model)]


# ---- meshes ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_mesh_says_which_ranks_share_a_node(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    ranks = of_all_ranks(world_size, SHAPES, torch.float32)
    means = {wire: reference.two_level_mean(ranks, 2, dtype) for wire, dtype in WIRES.items()}
    for entry_point in ENTRY_POINTS.values():
        for wire, mean in means.items():
            got = averaged(entry_point, ranks[rank], wire, process_group=mesh)
            assert_all_bitwise_equal(got, mean, f"{wire}: gradient")
        model, sync = entry_point(Given(ranks[0]), "none", process_group=mesh)
        for wire in ("none", "int8", "bf16"):
            sync.compression = wire
            assert sync.compression == Compression(wire, reduce="fp32", ranks_per_node=2)
            model.zero_grad()
            model(ranks[rank]).backward()
            assert_all_bitwise_equal(grads_of(model), means[wire], f"{wire}: gradient")
    parameters = [torch.zeros_like(grad).requires_grad_() for grad in ranks[rank]]
    for parameter, grad in zip(parameters, ranks[rank], strict=True):
        parameter.grad = grad.clone()
    fastsync.all_reduce_gradients(parameters, "int8", process_group=mesh)
    assert_all_bitwise_equal([p.grad for p in parameters if p.grad is not None], means["int8"], "at once: gradient")


@on_ranks(4)
def test_meshes_that_say_something_else_are_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    for entry_point in ENTRY_POINTS.values():
        for compression, message in (
            ("auto", r"compression: Auto\(.*\) measures ranks whose links are alike.*nodes have 2 each; name"),
            (Compression("int8", ranks_per_node=4), "compression: ranks_per_node=4, but .* nodes of 2 ranks"),
            (Compression("int8", algorithm="one_shot"), "ranks_per_node=2 has an algorithm of its own"),
        ):
            with pytest.raises(ValueError, match=message):
                entry_point(Given([torch.ones(3)]), compression, process_group=mesh)
        for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]]):
            other = DeviceMesh("cpu", ranks, mesh_dim_names=("nodes", "local"))
            message = r"process_group: the DeviceMesh has 2 dimensions .* 4 ranks in order"
            with pytest.raises(ValueError, match=message):
                entry_point(Given([torch.ones(3)]), "none", process_group=other)
        parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        message = r"process_group: the DeviceMesh has 2 dimensions \('dp', 'tp'\); .* name it, as in mesh\['dp'\]"
        with pytest.raises(ValueError, match=message):
            entry_point(Given([torch.ones(3)]), "none", process_group=parallel)


# ---- refusals -------------------------------------------------------------------------------------------------------
