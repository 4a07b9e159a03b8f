"""What is accepted as the mean: what roundings leave of it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from benchmarks.baselines.gradients import Rounding
from benchmarks.baselines.methods import LIMITS
from benchmarks.baselines.workloads import Size, Workload
from tests.models import group_of_one

CPU = torch.device("cpu")


def test_the_check_allows_rounding_and_nothing_else():
    with group_of_one():
        workload = Workload(Size([(40, 25)], repetitions=1), CPU)
    mean = workload.mean.float()
    summed = {wire: Rounding(wire) for wire in LIMITS}
    once = {wire: Rounding(wire, half_steps=1) for wire in LIMITS}
    assert workload.is_mean(mean, summed[torch.float32])
    for wire, wider in ((torch.float16, torch.float32), (torch.bfloat16, torch.float16)):
        assert workload.is_mean(mean.to(wire), summed[wire])
        assert workload.is_mean(mean.to(wire), once[wire])
        assert workload.is_mean(mean.to(wire), once[wider], summed[wire])
        assert not workload.is_mean(mean.to(wire), summed[wider])
        assert not workload.is_mean(mean.to(wire), once[wider])
    swapped = mean.clone()
    swapped[[0, 1]] = mean[[1, 0]]
    assert not workload.is_mean(swapped, summed[torch.bfloat16])
    assert not workload.is_mean(torch.full_like(mean, math.nan), summed[torch.bfloat16])
    # One rounding leaves half of what is allowed where the wire's dtype has the sums.
    between = mean * (1 + 0.75 * torch.finfo(torch.bfloat16).eps)
    assert workload.is_mean(between, summed[torch.bfloat16])
    assert not workload.is_mean(between, once[torch.bfloat16])
    assert workload.relative_error(2 * mean) == pytest.approx(1.0)


SHAPES = [(3, 100), (7,), (2, 64)]


def in_blocks(flat: torch.Tensor, round_: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """As an int8 wire carries it: blocks of 128 values, of which the last of a parameter may be shorter."""
    parts = flat.split([math.prod(shape) for shape in SHAPES])
    blocks = [block for part in parts for block in part.split(128)]
    scales = [block.abs().max() / 127 for block in blocks]
    return torch.cat([round_(block / scale) * scale for block, scale in zip(blocks, scales, strict=True)])


def test_the_check_knows_the_scales_of_blocks():
    with group_of_one():
        workload = Workload(Size(SHAPES, repetitions=1), CPU)
    mean = workload.mean.float()
    mean_as_sent = in_blocks(mean, torch.round)
    half, whole = Rounding(torch.int8, half_steps=1), Rounding(torch.int8, half_steps=2)
    assert workload.is_mean(mean_as_sent, half)
    assert not workload.is_mean(in_blocks(mean, torch.floor), half)
    assert workload.is_mean(in_blocks(mean, torch.floor), whole)
    assert not workload.is_mean(mean_as_sent.roll(1), whole)
    of_all = mean.abs().max() / 127
    assert not workload.is_mean((mean / of_all).round() * of_all, half)
