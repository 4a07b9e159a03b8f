"""How the segments of a launch are cut into tiles."""

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


def _expected(numels: list[int], tile_size: int) -> list[tuple[int, ...]]:
    begins = [sum(numels[:i]) for i in range(len(numels))]
    return [
        (first + begin, min(tile_size, numel - begin))
        for first, numel in zip(begins, numels, strict=True)
        for begin in range(0, numel, tile_size)
    ]


FEW = {
    "none": ([], 4),
    "small": ([3, 4, 9, 1], 4),
    "empty": ([0, 3, 0, 0, 5, 0], 4),
    "as many as fit": (_random_numels(12), 4096),
    "large": ([7, 3 * 2**32 + 5, 2**33], 2**31 + 11),  # beyond 32 bits
    "huge": ([2**40, 1], 2**28),
}
MANY = FEW | {"161": (_random_numels(161), 4096), "1017": (_random_numels(1017), 4096)}


@pytest.mark.parametrize("case", MANY)
def test_tiles_on_the_device_cover_every_element_once_and_in_order(case: str) -> None:
    assert _rows(torch.ops.fastsync_emulated.tiles_of_host(*MANY[case]), 2) == _expected(*MANY[case])


@pytest.mark.parametrize("case", FEW)
def test_a_kernel_cuts_few_segments_alike(case: str) -> None:
    assert _rows(torch.ops.fastsync_emulated.tiles_of_kernel(*FEW[case]), 2) == _expected(*FEW[case])
