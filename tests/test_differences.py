"""A bucket whose values are differences and whose averages go elsewhere, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastsync import _C, reference
from tests.bitwise import assert_bitwise_equal
from tests.ranks import run_ranks

SHAPES = [(3, 5), (128,), (1,), (70_001,), (0,), (300, 300)]
DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8}
NUM_STEPS = 3


def _tensors(rank: int, step: int) -> list[Tensor]:
    """Multiples of 2^-8, which no scale of an fp16 wire makes subnormal, nor what of them is kept for the next step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).mul(256).round() / 256 for shape in SHAPES]


def _minuends_and_subtrahends(rank: int, step: int) -> tuple[list[Tensor], list[Tensor]]:
    return _tensors(rank, step), _tensors(rank, NUM_STEPS + step)


def _expected_means(world_size: int, wire: str, algorithm: str, feeds_back: bool) -> list[list[Tensor]]:
    """Of each step, by the reference."""
    numels = [each.numel() for each in _tensors(0, 0)]
    options: dict[str, Any] = {"reduce": "wire"}
    if algorithm != "all_reduce":
        options = {"reduce": "fp32", "algorithm": algorithm}
    if feeds_back:
        options["residuals"] = [[torch.zeros(numel) for numel in numels] for _ in range(world_size)]
        if algorithm == "two_shot":
            multiple = reference.BLOCK_VALUES if wire == "int8" else 1
            options["reduced_residual"] = torch.zeros(sum(-(-numel // multiple) * multiple for numel in numels))
    means = []
    for step in range(NUM_STEPS):
        pairs = [_minuends_and_subtrahends(rank, step) for rank in range(world_size)]
        differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        means.append(reference.all_reduce_mean(differences, DTYPES[wire], **options))
    return means


def _average_differences(rank: int, world_size: int, cases: list[tuple[str, str, bool]]) -> None:
    for wire, algorithm, feeds_back in cases:
        compression = _C.Compression(
            wire, sums_in_float32=algorithm != "all_reduce", error_feedback=feeds_back, algorithm=algorithm
        )
        bucket = _C.LoneBucket(dist.group.WORLD)
        for step, means in enumerate(_expected_means(world_size, wire, algorithm, feeds_back)):
            minuends, subtrahends = _minuends_and_subtrahends(rank, step)
            destinations = [torch.full_like(each, 7.0) for each in minuends]
            bucket.average_differences(minuends, subtrahends, destinations, compression)
            said = f"{wire}, {algorithm}, error_feedback={feeds_back}, step {step}"
            for actual, expected in zip(destinations, means, strict=True):
                assert_bitwise_equal(actual, expected, said)
            for tensors, as_before in zip((minuends, subtrahends), _minuends_and_subtrahends(rank, step), strict=True):
                for tensor, before in zip(tensors, as_before, strict=True):
                    assert_bitwise_equal(tensor, before, f"what was read: {said}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_means_of_differences_are_the_references_and_what_was_read_stays(world_size: int) -> None:
    cases = [
        (wire, algorithm, feeds_back)
        for wire in DTYPES
        for algorithm in ("one_shot", "two_shot")
        for feeds_back in (False, True)[: 1 if wire == "none" else 2]
    ]
    if world_size == 2:  # the order in which Gloo adds more than two is its own
        cases += [(wire, "all_reduce", False) for wire in ("none", "bf16", "fp16")]
    run_ranks(_average_differences, world_size, cases)


def _in_place_and_far_from_zero(rank: int, world_size: int) -> None:
    steps = torch.arange(-16.0, 17.0, dtype=torch.float64) / 16
    for algorithm in ("one_shot", "two_shot", "all_reduce"):
        compression = _C.Compression("fp16", sums_in_float32=algorithm != "all_reduce", algorithm=algorithm)
        for target in (0, 1):
            pair = [2.0**40 + (rank + 1) * steps, torch.full_like(steps, 2.0**40)]
            _C.LoneBucket(dist.group.WORLD).average_differences([pair[0]], [pair[1]], [pair[target]], compression)
            assert torch.equal(pair[target], (world_size + 1) / 2 * steps), algorithm


def test_the_scale_follows_the_differences_and_they_may_go_where_they_came_from() -> None:
    """In float16, what is 2^-44 of the weights would vanish beside them."""
    run_ranks(_in_place_and_far_from_zero, 2)
