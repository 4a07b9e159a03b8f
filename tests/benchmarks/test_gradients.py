"""What is accepted as the mean: what roundings leave of it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.baselines.compressions import DEFAULT, ON_REQUEST, half_steps, split
from benchmarks.baselines.gradients import Rounding
from benchmarks.baselines.methods import LIMITS, METHODS
from benchmarks.baselines.workloads import Size, Workload
from tests import reference
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


NAMES = [name for name in (*DEFAULT, *ON_REQUEST) if half_steps(name)]


@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_hold_for_the_specification(name: str, monkeypatch: pytest.MonkeyPatch):
    """Over several steps of the same gradients, as benchmarks have them."""
    world_size = 5
    with group_of_one():
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
        workload = Workload(Size(SHAPES, repetitions=1), CPU)
    numel, lengths = workload.flat_grads.numel(), [math.prod(shape) for shape in SHAPES]
    flat = [torch.randn(numel, generator=torch.Generator().manual_seed(1 + rank)) for rank in range(world_size)]
    assert torch.equal(flat[0], workload.flat_grads)
    (rounding,) = METHODS[f"fastsync.attach/{name}"].allowed
    wire = torch.uint8 if rounding.wire == torch.int8 else rounding.wire
    with_feedback, two_shot = "ef" in split(name)[1], "one_shot" not in name
    residuals = [[torch.zeros(length) for length in lengths] for _ in flat] if with_feedback else None
    for _ in range(20):
        grads = [list(each.split(lengths)) for each in flat]
        algorithm = "two_shot" if two_shot else "one_shot"
        mean = reference.all_reduce_mean(grads, wire, reduce="fp32", algorithm=algorithm, residuals=residuals)
        mean = torch.cat(mean)
        assert workload.is_mean(mean, rounding)
    assert not workload.is_mean(mean, replace(rounding, half_steps=rounding.half_steps / 8))
