"""assert_bitwise_equal, which most tests rest on: what it takes for equal, and that it sees what is not."""

from __future__ import annotations

import pytest
import torch

from tests.bitwise import assert_bitwise_equal
from tests.models import assert_same_on_all_ranks
from tests.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_compared_but_for_those_of_a_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, float("inf")], [1.5, -2.0, float("nan")]], dtype=dtype)
    assert_bitwise_equal(values, values.t().contiguous().t())
    for other in (values[0], values.double() if dtype != torch.float64 else values.float()):
        with pytest.raises(AssertionError, match=r" of shape .* is not "):
            assert_bitwise_equal(values, other)
    for index, other in {(0, 0): -0.0, (0, 2): 1.0, (1, 2): 0.0}.items():
        changed = values.clone()
        changed[index] = other
        with pytest.raises(AssertionError, match=rf"1 of 6 elements differ, the first at \[{index[0]}, {index[1]}\]"):
            assert_bitwise_equal(changed, values)


@on_ranks(2)
def test_what_differs_between_ranks_is_named(rank: int, world_size: int) -> None:
    assert_same_on_all_ranks([torch.ones(3, 2).t()])
    with pytest.raises(AssertionError, match=rf"tensor 1 here and on rank {1 - rank}: 1 of 2 elements differ"):
        assert_same_on_all_ranks([torch.ones(3), torch.tensor([1.0, rank], dtype=torch.bfloat16)])
