"""Two to four models of random entry points, each trained by a thread of its own over a group of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.engine.test_models_in_threads import ENTRY_POINTS, train_in_threads
from tests.ranks import run_ranks

NUM_STEPS = 1000
TIMEOUT = 600.0


def test_models_in_threads(seeds: Iterator[int]) -> None:
    for seed in seeds:
        chosen = random.Random(seed)
        entry_points = chosen.choices(ENTRY_POINTS, k=chosen.randint(2, 4))
        run_ranks(train_in_threads, 2, entry_points, NUM_STEPS, timeout=TIMEOUT)
