"""How ranks find out who is missing: one of them reads all heartbeats, and the store sends the others a summary."""

from __future__ import annotations

import ctypes

import pytest

from tests import compiled

SOURCES = {"tests/roll_call/simulated.cpp": [], "csrc/transport/rank_state.cpp": []}
NUM_RANKS = 1024


@pytest.mark.parametrize(("lost_reader", "patience"), [(False, 30_000), (True, 300)])
def test_of_a_thousand_ranks_one_reads_the_heartbeats(lost_reader: bool, patience: int) -> None:
    library = ctypes.CDLL(str(compiled.library("roll_call", SOURCES, "csrc/transport/r*.h")))
    told = (ctypes.c_int64 * 4)()
    library.call_roll(ctypes.c_int64(NUM_RANKS), ctypes.c_int64(100), lost_reader, ctypes.c_int64(patience), told)
    num_reads, asked_by_a_rank, longest, num_right = told
    assert num_right == NUM_RANKS
    assert longest < 24 * NUM_RANKS
    if not lost_reader:  # else a slow machine may take the second for lost, too
        assert num_reads == 2
        assert asked_by_a_rank < 20
