"""Which gradient lies in which bucket."""

from __future__ import annotations

import random

import pytest

from fastsync import _C

F32, BF16 = 0, 1
MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "order", "cap", "expected"),
    [
        ([], [], 8, []),
        ([(4, F32)], [0], 8, [[0]]),
        ([(4, F32), (4, F32), (4, F32)], [2, 0, 1], 8, [[2, 0], [1]]),
        ([(100, F32), (4, F32)], [0, 1], 8, [[0], [1]]),  # one that is larger than a bucket has one of its own
        ([(4, F32), (2, BF16), (4, F32), (2, BF16)], [0, 1, 2, 3], 8, [[0, 2], [1, 3]]),
        # The bucket whose last parameter comes first is sent first, though another one was begun before it.
        ([(4, F32), (8, BF16), (4, F32)], [0, 1, 2], 8, [[1], [0, 2]]),
        # Where there are several, 1 MiB is enough for the first one to be sent.
        ([(MIB, F32)] * 5, [4, 3, 2, 1, 0], 3 * MIB, [[4], [3, 2, 1], [0]]),
        ([(MIB - 4, F32)] * 5, [0, 1, 2, 3, 4], 3 * MIB, [[0, 1], [2, 3, 4]]),
        ([(MIB, F32), (MIB, BF16), (MIB, BF16), (MIB, F32)], [0, 1, 2, 3], 2 * MIB, [[0], [1, 2], [3]]),
        ([(MIB, F32)] * 5, [0, 1, 2, 3, 4], 5 * MIB, [[0, 1, 2, 3, 4]]),
    ],
)
def test_small_layouts(sizes: list[tuple[int, int]], order: list[int], cap: int, expected: list[list[int]]) -> None:
    assert _C.lay_out_buckets(sizes, order, cap) == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_is_in_one_bucket_of_its_kind(seed: int) -> None:
    numbers = random.Random(seed)
    sizes = [(numbers.randint(1, 50), numbers.randint(0, 2)) for _ in range(numbers.randint(1, 60))]
    order = list(range(len(sizes)))
    numbers.shuffle(order)
    cap = numbers.randint(1, 120)
    layout = _C.lay_out_buckets(sizes, order, cap)
    assert sorted(index for bucket in layout for index in bucket) == sorted(order)
    last_places = []
    for bucket in layout:
        assert len({sizes[index][1] for index in bucket}) == 1
        assert sum(sizes[index][0] for index in bucket[:-1]) < cap, "it was full before"
        places = [order.index(index) for index in bucket]
        assert places == sorted(places)
        last_places.append(places[-1])
    assert last_places == sorted(last_places)
    for kind in {kind for _, kind in sizes}:
        full = [sum(sizes[i][0] for i in bucket) >= cap for bucket in layout if sizes[bucket[0]][1] == kind]
        assert full.count(False) <= 1, "two buckets of a kind have room left"
