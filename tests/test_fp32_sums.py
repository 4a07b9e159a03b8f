"""Sums that ranks take in float32 themselves: bit for bit what the specification says, and sent the shorter way."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import fastsync
from fastsync import Compression, reference
from fastsync.compression import Algorithm, Wire
from tests.compare import assert_bitwise_equal
from tests.models import random_grads
from tests.ranks import run_ranks

DTYPES: dict[Wire, torch.dtype | None] = {
    "none": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.uint8,
}
SHAPES = [(700, 500), (3,), (129,), (1000, 201), (1,)]
"""Two pieces and more on every wire but int8, with gradients that end within a block and within a shard."""
FLAG_BYTES = 4
"""Of one parameter, to one rank."""


def _expected(
    all_grads: list[list[Tensor]],
    compression: Compression,
    residuals: list[list[Tensor]] | None,
    of_sums: Tensor,
) -> list[Tensor]:
    assert compression.algorithm is not None
    return reference.all_reduce_mean(
        all_grads,
        DTYPES[compression.wire],
        reduce="fp32",
        algorithm=compression.algorithm,
        residuals=residuals,
        reduced_residual=of_sums if compression.error_feedback else None,
    )


def _as_specified(rank: int, world_size: int, compression: Compression, dtype: torch.dtype, num_steps: int) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    sync = fastsync.attach(parameters, compression, overlap=False)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    residuals = [[torch.zeros(p.numel(), dtype=compute) for p in parameters] for _ in range(world_size)]
    padded = reference.wire_numel([p.numel() for p in parameters], DTYPES[compression.wire] or dtype)
    of_sums = torch.zeros(padded // 132 * 128 if compression.wire == "int8" else padded, dtype=compute)
    for step in range(num_steps):
        all_grads = [random_grads(other, step, SHAPES, dtype) for other in range(world_size)]
        for parameter, grad in zip(parameters, all_grads[rank], strict=True):
            parameter.grad = grad.clone()
        sync.synchronize()
        mean = _expected(all_grads, compression, residuals if compression.error_feedback else None, of_sums)
        for index, (parameter, expected) in enumerate(zip(parameters, mean, strict=True)):
            assert parameter.grad is not None
            assert_bitwise_equal(parameter.grad, expected, f"{compression}, step {step}, gradient {index}")
    sync.detach()


def _all_as_specified(rank: int, world_size: int) -> None:
    for algorithm in get_args(Algorithm):
        for wire in get_args(Wire):
            _as_specified(rank, world_size, Compression(wire, reduce="fp32", algorithm=algorithm), torch.float32, 1)
        for wire in ("bf16", "int8"):
            compression = Compression(wire, reduce="fp32", algorithm=algorithm, error_feedback=True)
            _as_specified(rank, world_size, compression, torch.float32, 3)
        for dtype in (torch.float64, torch.bfloat16):
            compression = Compression("int8", algorithm=algorithm, error_feedback=True)
            _as_specified(rank, world_size, compression, dtype, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_the_specification_s(world_size: int) -> None:
    run_ranks(_all_as_specified, world_size)


def _payloads(rank: int, world_size: int, numel: int) -> float:
    """Copies of a bucket's values that this rank sends."""
    parameter = nn.Parameter(torch.zeros(numel))
    sync = fastsync.attach([parameter], Compression("bf16", reduce="fp32"), overlap=False)
    parameter.grad = torch.ones_like(parameter)
    sync.synchronize()
    return (sync.stats().wire_bytes - FLAG_BYTES * (world_size - 1)) / (2 * numel)


@pytest.mark.parametrize(
    ("world_size", "numel", "payloads"),
    [
        (2, 300_000, 1.0),  # the same either way, so the fewer steps
        (3, 40_000, 2.0),  # two_shot would save 2/3 of 80,000 bytes: less than 64 KiB
        (3, 300_000, 4 / 3),
    ],
)
def test_the_algorithm_by_default_is_what_sends_less(world_size: int, numel: int, payloads: float) -> None:
    """But for small buckets, where a step of the network costs more than the bytes."""
    assert run_ranks(_payloads, world_size, numel) == pytest.approx([payloads] * world_size, rel=0.01)
