"""tests.reference against facts that do not come from it: rational arithmetic, small integers, worked examples."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.bitwise import assert_bitwise_equal
from tests.engine.sample_inputs import GRAD_DTYPES

HALVES = [torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan
random_examples = settings(derandomize=True, deadline=None, max_examples=300)

# Bits of the significand, exponent of the smallest subnormal (IEEE 754; bfloat16 is float32 without 16 bits).
FORMATS = {
    torch.float16: (11, -24),
    torch.bfloat16: (8, -133),
    torch.float32: (24, -149),
    torch.float64: (53, -1074),
}


def nearest_even(value: Fraction, dtype: torch.dtype) -> Fraction | float:
    """The value of ``dtype`` that is nearest to a rational number, or an infinity."""
    if value == 0:
        return Fraction(0)
    bits, smallest_exponent = FORMATS[dtype]
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > abs(value):
        exponent -= 1
    step = Fraction(2) ** max(exponent - bits + 1, smallest_exponent)
    rounded = round(value / step) * step  # Fraction rounds halves to even
    return rounded if abs(rounded) <= Fraction(torch.finfo(dtype).max) else math.copysign(INF, rounded)


def new_stats() -> Tensor:
    return torch.full((reference.NUM_STATS,), -1.0, dtype=torch.float64)


def pack(grads: list[Tensor], wire: torch.dtype, scale: float | None = None, **options: float) -> tuple[Tensor, Tensor]:
    packed, stats = torch.empty(sum(grad.numel() for grad in grads), dtype=wire), new_stats()
    reference.pack(grads, packed, stats, None if scale is None else torch.tensor(scale), **options)
    return packed, stats


# ---- pack -----------------------------------------------------------------------------------------------------------


@given(
    value=st.floats(allow_nan=False, allow_infinity=False, width=32),
    multiplier=st.sampled_from([1.0, 1 / 3, 0.1, 7.0]),
    exponent=st.integers(-30, 30),
    wire=st.sampled_from([torch.float32, *HALVES]),
)
@random_examples
def test_pack_multiplies_in_float32_and_rounds_once(
    value: float, multiplier: float, exponent: int, wire: torch.dtype
) -> None:
    factor = nearest_even(Fraction(multiplier), torch.float32) * Fraction(2) ** exponent
    product = nearest_even(Fraction(value) * factor, torch.float32)
    expected = nearest_even(product, wire) if isinstance(product, Fraction) else product
    packed, _ = pack([torch.tensor([value])], wire, 2.0**exponent, multiplier=multiplier)
    assert packed.item() == float(expected)
    assert math.copysign(1, packed.item()) == math.copysign(1, value)


def test_finite_values_beyond_the_limit_saturate_and_are_counted() -> None:
    grads = [torch.tensor([2.0, 2.5, -2.0, -2.5, 3e38, INF, -INF, NAN])]
    packed, stats = pack(grads, torch.float16, limit=4.0, multiplier=2.0)
    assert_bitwise_equal(packed, torch.tensor([4, 4, -4, -4, 4, INF, -INF, NAN], dtype=torch.float16))
    assert stats.tolist() == [-1, -1, 3, -1]
    reference.measure(grads, stats)
    assert stats[1:].tolist() == [3, 3, float(torch.tensor(3e38))]


# ---- unpack and measure ---------------------------------------------------------------------------------------------


@given(
    value=st.floats(allow_nan=False, allow_infinity=False, width=16),
    exponent=st.integers(-30, 30),
    grad=st.sampled_from(GRAD_DTYPES),
)
@random_examples
def test_unpack_divides_by_the_scale_and_keeps_finite_what_is(value: float, exponent: int, grad: torch.dtype) -> None:
    exact = nearest_even(Fraction(value) / Fraction(2) ** exponent, grad)
    largest = torch.finfo(grad).max
    expected = max(-largest, min(largest, float(exact)))
    written = torch.zeros(1, dtype=grad)
    scale = torch.tensor(2.0**exponent)
    reference.unpack(torch.tensor([value], dtype=torch.float16), [written], new_stats(), scale)
    assert written.item() == expected


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_statistics_of_small_integers_are_exact(dtype: torch.dtype) -> None:
    grads = [torch.tensor([[3.0, -4.0]], dtype=dtype), torch.tensor(12.0, dtype=dtype), torch.empty(0, dtype=dtype)]
    stats = new_stats()
    reference.measure(grads, stats)
    assert stats.tolist() == [169, 0, -1, 12]
    written, stats = [torch.empty_like(grad) for grad in grads], new_stats()
    reference.unpack(torch.tensor([6.0, -8.0, 24.0], dtype=dtype), written, stats, torch.tensor(2.0))
    assert stats.tolist() == [169, 0, -1, 12]


# ---- how far values may go ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", HALVES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 64, 1000])
def test_saturation_limit_is_the_largest_that_cannot_overflow(wire: torch.dtype, world_size: int) -> None:
    bits, _ = FORMATS[wire]
    growth = world_size * (1 + Fraction(1, 2**bits)) ** (world_size - 1)
    limit = torch.tensor(reference.saturation_limit(wire, world_size), dtype=wire)
    assert limit.item() == reference.saturation_limit(wire, world_size)
    largest = Fraction(torch.finfo(wire).max)
    assert Fraction(limit.item()) * growth <= largest
    if world_size > 1:
        following = limit.nextafter(torch.tensor(INF, dtype=wire)).item()
        assert Fraction(following) * growth > largest


@given(magnitude=st.floats(2.0**-90, 2.0**90, width=32), exponent=st.integers(-118, 118))
@random_examples
def test_next_scale_falls_at_once_and_rises_by_two(magnitude: float, exponent: int) -> None:
    wanted = reference.initial_bucket_scale(magnitude)
    scale = 2.0**exponent
    following = reference.next_bucket_scale(scale, magnitude)
    assert following == (2 * scale if wanted > scale else wanted)
    for _ in range(200):
        following = reference.next_bucket_scale(following, magnitude)
    assert following == wanted


# ---- blocks of int8 -------------------------------------------------------------------------------------------------


def test_a_block_is_a_scale_and_128_bytes() -> None:
    values = torch.zeros(130)
    values[:4] = torch.tensor([254.0, -254.0, 1.0, -3.0])
    values[128:] = torch.tensor([0.5, 127.0])
    wire = reference.encode_blocks(values)
    assert len(wire) == 2 * 132
    assert wire[:4].view(torch.float32).item() == 2
    assert wire[4:132].view(torch.int8).tolist() == [127, -127, 0, -2] + [0] * 124  # halves go to even
    assert wire[132:136].clone().view(torch.float32).item() == 1
    assert wire[136:].view(torch.int8).tolist() == [0, 127] + [0] * 126
    assert reference.decode_blocks(wire)[:4].tolist() == [254, -254, 0, -4]


def test_blocks_of_zeros_and_of_what_is_not_finite() -> None:
    values = torch.cat([torch.zeros(128), torch.full((128,), 1.0), torch.full((128,), 2.0)])
    values[200] = -INF
    decoded = reference.decode_blocks(reference.encode_blocks(values))
    assert_bitwise_equal(decoded[:128], torch.zeros(128))
    assert decoded[128:256].isnan().all()
    assert decoded[256:].tolist() == [2.0] * 128
