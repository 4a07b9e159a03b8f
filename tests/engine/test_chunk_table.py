"""How segments are cut into chunks, and calls into launches: the arithmetic that both backends share."""

from __future__ import annotations

import random

import pytest
import torch

from tests import emulated


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    emulated.load()


def chunk_table(numels: list[int], chunk_size: int) -> list[tuple[int, ...]]:
    flat = torch.ops.fastsync_emulated.chunk_table(numels, chunk_size)
    return [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]


def launch_ranges(numels: list[int], capacity: int) -> list[tuple[int, ...]]:
    flat = torch.ops.fastsync_emulated.launch_ranges(numels, capacity)
    return [tuple(flat[i : i + 2]) for i in range(0, len(flat), 2)]


def _expected_chunks(numels: list[int], chunk_size: int) -> list[tuple[int, int, int]]:
    return [
        (segment, begin, min(chunk_size, numel - begin))
        for segment, numel in enumerate(numels)
        for begin in range(0, numel, chunk_size)
    ]


def _random_numels(num_segments: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.choice([0, 1, 4095, 4096, 4097, numbers.randint(0, 50_000)]) for _ in range(num_segments)]


@pytest.mark.parametrize(
    ("numels", "chunk_size", "expected"),
    [
        ([], 4, []),
        ([0], 4, []),
        ([1], 4, [(0, 0, 1)]),
        ([4], 4, [(0, 0, 4)]),
        ([5], 4, [(0, 0, 4), (0, 4, 1)]),
        ([0, 3, 0, 0, 9, 0], 4, [(1, 0, 3), (4, 0, 4), (4, 4, 4), (4, 8, 1)]),
    ],
)
def test_small_tables(numels: list[int], chunk_size: int, expected: list[tuple[int, int, int]]) -> None:
    assert chunk_table(numels, chunk_size) == expected


@pytest.mark.parametrize("num_segments", [1, 2, 3, 160, 161, 500, 1017])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_cover_every_element_once_and_in_order(num_segments: int, seed: int) -> None:
    numels = _random_numels(num_segments, seed)
    assert chunk_table(numels, 4096) == _expected_chunks(numels, 4096)


def test_segments_beyond_32_bits() -> None:
    chunk_size = 2**31 + 11
    numels = [7, 3 * 2**32 + 5, 0, 2**33]
    assert chunk_table(numels, chunk_size) == _expected_chunks(numels, chunk_size)


def test_chunk_numbers_stay_exact_after_a_huge_segment() -> None:
    table = chunk_table([2**40, 1], 2**28)
    assert len(table) == 2**12 + 1
    assert table[-2:] == [(0, 2**40 - 2**28, 2**28), (1, 0, 1)]


@pytest.mark.parametrize(
    ("numels", "capacity", "expected"),
    [
        ([], 3, [(0, 0)]),
        ([0, 0], 3, [(0, 2)]),
        ([1, 1, 1], 3, [(0, 3)]),
        ([1, 1, 1, 1], 3, [(0, 3), (3, 4)]),
        ([0, 1, 0, 1, 1, 0], 3, [(0, 6)]),
        ([0, 1, 0, 1, 1, 0, 1, 0], 3, [(0, 6), (6, 8)]),
        ([1] * 7, 3, [(0, 3), (3, 6), (6, 7)]),
    ],
)
def test_launches_take_at_most_capacity_nonempty_segments(
    numels: list[int], capacity: int, expected: list[tuple[int, int]]
) -> None:
    assert launch_ranges(numels, capacity) == expected


@pytest.mark.parametrize("num_segments", [160, 500, 676, 677, 2500])
def test_launches_cover_every_segment_once_and_are_as_few_as_possible(num_segments: int) -> None:
    capacity = 676
    numels = _random_numels(num_segments, seed=num_segments)
    num_nonempty = sum(numel > 0 for numel in numels)
    ranges = launch_ranges(numels, capacity)
    assert [segment for begin, end in ranges for segment in range(begin, end)] == list(range(num_segments))
    assert all(sum(numel > 0 for numel in numels[begin:end]) <= capacity for begin, end in ranges)
    assert len(ranges) == -(-num_nonempty // capacity)
