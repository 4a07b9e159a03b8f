"""Two levels: at full width inside a node, in the wire's format between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
def test_ranks_of_a_node_add_at_full_width(rank: int, world_size: int) -> None:
    ranks = of_all_ranks(world_size)
    means = {wire: reference.two_level_mean(ranks, 2, dtype) for wire, dtype in WIRES.items()}
    for entry_point in ENTRY_POINTS:
        for wire, mean in means.items():
            got = averaged(entry_point, ranks[rank], Compression(wire, ranks_per_node=2))
            assert_all_bitwise_equal(got, mean, f"{entry_point}, {wire}: gradient")
    for entry_point in ("hook", "attach"):
        given = average(entry_point, Given(ranks[0]), bucket_cap_mb=25)
        for wire in ("none", "int8", "bf16"):
            given.handle.compression = Compression(wire, ranks_per_node=2)
            got = [grad for grad in given.step(ranks[rank]) if grad is not None]
            assert_all_bitwise_equal(got, means[wire], f"{entry_point}, {wire}: gradient")
