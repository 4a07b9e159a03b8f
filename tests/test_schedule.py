"""Schedules: another compression from some step on."""

from __future__ import annotations

import pytest

import fastsync
from fastsync.compression import as_compression


def test_a_mapping_of_first_steps_is_shorthand() -> None:
    schedule = as_compression({0: "none", 10: "auto", 1000: fastsync.Compression("fp16")})
    fp16 = fastsync.Compression("fp16")
    assert schedule == fastsync.Schedule(((0, fastsync.Compression()), (10, fastsync.Auto()), (1000, fp16)))
    assert as_compression(schedule) is schedule
    assert hash(schedule) == hash(as_compression({0: "none", 10: "auto", 1000: "fp16"}))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, r"has to say what begins at step 0, got steps \[\]"),
        ({1: "none"}, r"has to say what begins at step 0, got steps \[1\]"),
        ({0: "none", 20: "fp16", 10: "bf16"}, r"have to ascend, got \[0, 20, 10\]"),
        ({0: "none", -1: "fp16"}, r"have to ascend, got \[0, -1\]"),
        ({0: "none", 1.5: "fp16"}, r"have to be whole numbers, got \[0, 1\.5\]"),
        ({False: "none"}, r"have to be whole numbers, got \[False\]"),
        ({0: "none", 5: "fp8"}, "expected one of 'none', .*, got 'fp8'"),
        ({0: {0: "none"}}, "expected a Compression or an Auto from step 0 on, got Schedule"),
    ],
)
def test_a_mapping_that_is_no_schedule_is_refused(mapping: dict[int, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^compression: .*{message}"):
        as_compression(mapping)


def test_steps_that_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have to ascend, got \[0, 0\]"):
        fastsync.Schedule(((0, fastsync.Compression()), (0, fastsync.Compression("fp16"))))
