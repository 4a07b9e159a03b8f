"""Two levels: at full width inside a node, in the wire's format between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastsync import Compression
from fastsync.compression import AnyCompression
from tests import reference
from tests.engine.entry_points import average
from tests.models import Given, assert_all_bitwise_equal, random_grads
from tests.ranks import on_ranks

WIRES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8, "int4": torch.int8}
# Neither divides by the number of ranks, nor by that of values in a block.
SHAPES = [(37, 11), (3,), (1,), (700,)]
ENTRY_POINTS = ("hook", "attach", "all_reduce")


def averaged(entry_point: str, grads: Sequence[Tensor], compression: AnyCompression, **options: Any) -> list[Tensor]:
    given = average(entry_point, Given(grads), compression, bucket_cap_mb=25, **options)
    return [grad for grad in given.step(grads) if grad is not None]


def of_all_ranks(world_size: int) -> list[list[Tensor]]:
    return [random_grads(rank, 0, SHAPES, torch.float32) for rank in range(world_size)]


@on_ranks(2)
def test_within_one_node_nothing_is_compressed(rank: int, world_size: int) -> None:
    ranks = of_all_ranks(world_size)
    expected = reference.all_reduce_mean(ranks, reduce="fp32", algorithm="two_shot")
    for entry_point in ENTRY_POINTS:
        got = averaged(entry_point, ranks[rank], Compression("int8", error_feedback=True, ranks_per_node=world_size))
        assert_all_bitwise_equal(got, expected, "gradient")


@on_ranks(4)
def test_a_mesh_says_which_ranks_share_a_node(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    ranks = of_all_ranks(world_size)
    means = {wire: reference.two_level_mean(ranks, 2, dtype) for wire, dtype in WIRES.items()}
    for entry_point in ENTRY_POINTS:
        for wire, mean in means.items():
            got = averaged(entry_point, ranks[rank], wire, group=mesh)
            assert_all_bitwise_equal(got, mean, f"{entry_point}, {wire}: gradient")
    for entry_point in ("hook", "attach"):
        given = average(entry_point, Given(ranks[0]), "none", group=mesh, bucket_cap_mb=25)
        for wire in ("none", "int8", "bf16"):
            given.handle.compression = wire
            assert given.handle.compression == Compression(wire, reduce="fp32", ranks_per_node=2)
            got = [grad for grad in given.step(ranks[rank]) if grad is not None]
            assert_all_bitwise_equal(got, means[wire], f"{entry_point}, {wire}: gradient")


@on_ranks(4)
def test_meshes_that_say_something_else_are_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    for entry_point in ("hook", "attach"):
        for compression, message in (
            ("auto", r"compression: Auto\(.*\) measures ranks whose links are alike.*nodes have 2 each; name"),
            (Compression("int8", ranks_per_node=4), "compression: ranks_per_node=4, but .* nodes of 2 ranks"),
            (Compression("int8", algorithm="one_shot"), "ranks_per_node=2 has an algorithm of its own"),
        ):
            with pytest.raises(ValueError, match=message):
                average(entry_point, Given([torch.ones(3)]), compression, group=mesh)
        for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]]):
            other = DeviceMesh("cpu", ranks, mesh_dim_names=("nodes", "local"))
            message = r"process_group: the DeviceMesh has 2 dimensions .* 4 ranks in order"
            with pytest.raises(ValueError, match=message):
                average(entry_point, Given([torch.ones(3)]), "none", group=other)
        parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        message = r"process_group: the DeviceMesh has 2 dimensions \('dp', 'tp'\); .* name it, as in mesh\['dp'\]"
        with pytest.raises(ValueError, match=message):
            average(entry_point, Given([torch.ones(3)]), "none", group=parallel)
