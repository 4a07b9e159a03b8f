"""assert_bitwise_equal: what it takes for equal, and what it says where two tensors part."""

from __future__ import annotations

import re

import pytest
import torch

from tests.bitwise import assert_bitwise_equal
from tests.models import assert_same_on_all_ranks
from tests.ranks import run_ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_are_equal(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, float("inf")], [1.5, -2.0, float("nan")]], dtype=dtype)
    assert_bitwise_equal(values, values.t().contiguous().t())
    assert_bitwise_equal(values[0, 0], values[0, 0].clone())
    assert_bitwise_equal(values[:0], values[:0].clone())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("actual", "expected"), [(0.0, -0.0), (1.0, 2.0), (float("nan"), 0.0), (0.0, float("nan"))])
def test_other_bits_differ(dtype: torch.dtype, actual: float, expected: float) -> None:
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        assert_bitwise_equal(torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype))


def test_first_difference_is_reported_with_both_values_and_bits() -> None:
    expected = torch.zeros(3, 4)
    actual = expected.clone()
    actual[1, 2] = 1.0
    actual[2, 0] = -2.0
    message = "wire: 2 of 12 elements differ, the first at [1, 2]: 1.0 (bits 0x3f800000) is not 0.0 (bits 0x00000000)"
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_bitwise_equal(actual, expected, "wire")


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)])
def test_other_shape_or_dtype_differs(other: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"torch\.float32 of shape \(2,\) is not"):
        assert_bitwise_equal(torch.zeros(2), other)


def _same_and_not(rank: int, world_size: int) -> None:
    nan = torch.tensor([0x7FC00000 + rank], dtype=torch.int32).view(torch.float32)
    assert_same_on_all_ranks([torch.ones(3, 2).t(), nan, torch.tensor(1.0, dtype=torch.float16)])
    difference = rf"tensor 1 here and on rank {1 - rank}: 1 of 2 elements differ.* at \[1\]"
    with pytest.raises(AssertionError, match=difference):
        assert_same_on_all_ranks([torch.ones(3), torch.tensor([1.0, rank], dtype=torch.bfloat16)])


def test_what_differs_between_ranks_is_named() -> None:
    run_ranks(_same_and_not, 2)
