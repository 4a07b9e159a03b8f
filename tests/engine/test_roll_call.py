"""How ranks find out who is missing: one of them reads all heartbeats, and the store sends the others a summary."""

from __future__ import annotations

import ctypes

import pytest

from tests import compiled

SOURCES = {"tests/roll_call/simulated.cpp": [], "csrc/transport/rank_state.cpp": []}
NUM_RANKS = 1024


def _call(num_ranks: int, patience: int, *, lost_reader: bool = False, num_calls: int = 1) -> list[int]:
    """How often heartbeats were read, requests a rank, the longest text, and how many answers were right."""
    library = ctypes.CDLL(str(compiled.library("roll_call", SOURCES, "csrc/transport/r*.h")))
    told = (ctypes.c_int64 * 4)()
    numbers = map(ctypes.c_int64, (num_ranks, 100, lost_reader, patience, num_calls))
    library.call_roll(*numbers, told)
    return list(told)


def test_calls_one_after_the_other_end() -> None:
    """A rank may wait for a call whose reader has begun the next one."""
    assert _call(64, 300, num_calls=10)[3] == 64 * 10


@pytest.mark.parametrize(("lost_reader", "patience"), [(False, 30_000), (True, 300)])
def test_of_a_thousand_ranks_one_reads_the_heartbeats(lost_reader: bool, patience: int) -> None:
    num_reads, asked_by_a_rank, longest, num_right = _call(NUM_RANKS, patience, lost_reader=lost_reader)
    assert num_right == NUM_RANKS
    assert longest < 24 * NUM_RANKS
    if not lost_reader:  # else a slow machine may take the second for lost, too
        assert num_reads < NUM_RANKS // 50  # two, and two more for threads that begin when the first call has ended
        assert asked_by_a_rank < 20
