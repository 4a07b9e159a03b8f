"""How the segments of a launch are cut into chunks."""

from __future__ import annotations

import random

import pytest
import torch

from tests import emulated


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    emulated.load()


def _rows(flat: list[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + length]) for i in range(0, len(flat), length)]


def _random_numels(num_segments: int) -> list[int]:
    numbers = random.Random(num_segments)
    return [numbers.choice([1, 4095, 4096, 4097, numbers.randint(1, 50_000)]) for _ in range(num_segments)]


@pytest.mark.parametrize(
    ("numels", "chunk_size"),
    [
        ([], 4),
        ([3, 4, 9, 1], 4),
        (_random_numels(161), 4096),
        (_random_numels(1017), 4096),
        ([7, 3 * 2**32 + 5, 2**33], 2**31 + 11),  # beyond 32 bits
        ([2**40, 1], 2**28),
    ],
    ids=["none", "small", "161", "1017", "large", "huge"],
)
def test_chunks_cover_every_element_once_and_in_order(numels: list[int], chunk_size: int) -> None:
    assert _rows(torch.ops.fastsync_emulated.chunk_table(numels, chunk_size), 3) == [
        (segment, begin, min(chunk_size, numel - begin))
        for segment, numel in enumerate(numels)
        for begin in range(0, numel, chunk_size)
    ]
