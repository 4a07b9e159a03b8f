"""Who adds up in float32 where no algorithm was asked for: what sends less, but for small buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastsync
from fastsync import Compression
from tests.ranks import run_ranks

FLAG_BYTES = 4
"""Of one parameter, to one rank."""


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
    measured = run_ranks(_payloads, world_size, numel, shared_memory=False)
    assert measured == pytest.approx([payloads] * world_size, rel=0.01)
