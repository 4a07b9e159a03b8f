"""The ways that a choice by measurement is held against."""

from __future__ import annotations

from benchmarks.harness.records import Record
from benchmarks.report.choices import against_the_best


def test_a_choice_is_held_against_what_it_could_have_chosen():
    def made(way: str, seconds: float) -> Record:
        return Record("sync", f"fastsync.{way}", {}, {}, True, [seconds, seconds, seconds], {})

    rows = [made("attach/none", 4.0), made("attach/fp16+one_shot", 2.0), made("attach/auto", 2.0625)]
    # None of these may be chosen: another entry point, and wires that lose more.
    rows += [made("register_comm_hook/fp16", 1.0), made("attach/int8+ef", 1.0)]
    (line,) = against_the_best(rows)
    assert line == (
        "fastsync.attach/auto: 1.031 [1.031, 1.031] × the best of 2 it could have chosen, "
        "fastsync.attach/fp16+one_shot: as promised"
    )
    _, line = against_the_best([*rows, made("attach/auto:int8", 1.0625)])
    assert line.startswith("fastsync.attach/auto:int8: 1.062 [1.062, 1.062] × the best of 3 it could have chosen, ")
    assert line.endswith("fastsync.attach/int8+ef: MORE than the promised 1.05, beyond noise")
