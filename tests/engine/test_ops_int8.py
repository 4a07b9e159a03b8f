"""Blocks of int8 on the wire: torch.ops.fastsync against tests.reference, and what becomes of the values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastsync._C  # noqa: F401 registers torch.ops.fastsync
from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.emulated import ops
from tests.engine.sample_inputs import GRAD_DTYPES, on_each_device

random_examples = settings(derandomize=True, deadline=None, max_examples=200)
BLOCK = reference.BLOCK_VALUES
INF, NAN = math.inf, math.nan


def new_stats(device: str = "cpu") -> Tensor:
    return torch.zeros(reference.NUM_STATS, dtype=torch.float64, device=device)


def new_wire(grads: list[Tensor]) -> Tensor:
    numel = reference.wire_numel([grad.numel() for grad in grads], torch.uint8)
    return torch.zeros(numel, dtype=torch.uint8, device=grads[0].device)


def _huge_spread(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator) * torch.exp2(torch.linspace(-140, 120, numel))


def _one_outlier(numel: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(numel, generator=generator)
    values[numel // 3 : numel // 3 + 1] = 1e9
    return values


def _halves(numel: int, generator: torch.Generator) -> Tensor:
    """Of each block the first is its largest, the others lie halfway between two steps."""
    values = torch.randint(-127, 127, (numel,), generator=generator) + 0.5
    values[::BLOCK] = 127.0
    return values


ADVERSARIES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "huge spread": _huge_spread,
    "one outlier": _one_outlier,
    "halves": _halves,
    "subnormal": lambda numel, generator: torch.randn(numel, generator=generator) * 2.0**-130,
    "around the smallest scale": lambda numel, generator: torch.randn(numel, generator=generator) * 2.0**-110,
    "constant": lambda numel, generator: torch.full((numel,), -0.3),
    "zeros": lambda numel, generator: torch.copysign(torch.zeros(numel), torch.randn(numel, generator=generator)),
    "largest": lambda numel, generator: torch.randn(numel, generator=generator).sign() * 3.4028234e38,
    "ordinary": lambda numel, generator: torch.randn(numel, generator=generator),
}


def adversary(kind: str, numel: int, seed: int = 0) -> Tensor:
    return ADVERSARIES[kind](numel, torch.Generator().manual_seed(seed))


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@given(
    kind=st.sampled_from(list(ADVERSARIES)),
    numels=st.lists(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257, 512, 600]), min_size=1, max_size=4),
    num_wires=st.integers(1, 8),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_adversaries_give_the_references_bits(
    dtype: torch.dtype, device: str, kind: str, numels: list[int], num_wires: int
) -> None:
    wires, expected_wires = [], []
    for rank in range(num_wires):
        grads = [adversary(kind, numel, rank).to(dtype) for numel in numels]
        on_device = [grad.to(device) for grad in grads]
        wires.append(new_wire(on_device))
        expected_wires.append(new_wire(grads))
        stats, expected_stats = new_stats(device), new_stats()
        ops.pack(on_device, wires[-1], stats)
        reference.pack(grads, expected_wires[-1], expected_stats)
        assert_bitwise_equal(wires[-1], expected_wires[-1], "wire")
        assert_bitwise_equal(stats, expected_stats, "stats")
    summed, expected = torch.stack(wires), torch.stack(expected_wires)
    out, expected_out = torch.empty_like(summed[0]), torch.empty_like(expected[0])
    options = {"multiplier": 1 / num_wires, "grad_dtype": dtype}
    ops.reduce(summed, out, **options)
    reference.reduce(expected, expected_out, **options)
    assert_bitwise_equal(out, expected_out, "out")
    ops.unpack(summed, on_device, stats, multiplier=1 / num_wires)
    reference.unpack(expected, grads, expected_stats, multiplier=1 / num_wires)
    for grad, expected_grad in zip(on_device, grads, strict=True):
        assert_bitwise_equal(grad, expected_grad, "grad")


# ---- in pieces ------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("odd_one", [10.0, math.nan])
def test_a_bucket_in_pieces_is_the_bucket_at_once(
    odd_one: float, wire_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """Pieces of one gradient that end where a block does; the scale moves on with the last.

    The first one alone has a value that saturates, and is then the largest, or is not finite.
    """
    size, per_block = (BLOCK, reference.block_bytes(torch.uint8)) if wire_dtype == torch.uint8 else (1, 1)
    values = adversary("ordinary", 7 * BLOCK + 5) / 10
    values[BLOCK + 1] = odd_one
    grad = values.to(dtype).to(device)
    numel = reference.wire_numel([len(grad)], wire_dtype)
    whole, parts = (torch.zeros(numel, dtype=wire_dtype, device=device) for _ in range(2))
    scale, part_scale = (torch.tensor(2.0, device=device) for _ in range(2))
    stats, part_stats = new_stats(device), new_stats(device)
    pieces = list(zip(grad.split(2 * BLOCK), parts.split(2 * BLOCK // size * per_block), strict=True))
    ops.pack([grad], whole, stats, scale, limit=1.5)
    for i, (piece, part) in enumerate(pieces):
        ops.pack([piece], part, part_stats, part_scale, limit=1.5, is_first=i == 0)
    assert_bitwise_equal(parts, whole)
    assert_bitwise_equal(part_stats, stats)
    assert stats[reference.NUM_SATURATED] == (odd_one == 10.0)
    ops.unpack(whole, [grad], stats, scale)
    assert (stats[reference.NUM_NONFINITE] > 0) == math.isnan(odd_one)
    expected = grad.clone()
    grad.zero_()
    for i, (piece, part) in enumerate(pieces):
        ops.unpack(part, [piece], part_stats, part_scale, is_first=i == 0, is_last=i == len(pieces) - 1)
    assert_bitwise_equal(grad, expected)
    torch.testing.assert_close(part_stats, stats, rtol=1e-6, atol=0, equal_nan=True)
    assert part_scale == scale == 4.0
