"""``benchmarks micro_batches`` on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

pytestmark = pytest.mark.end_to_end


def test_both_ways_give_the_same_mean(tmp_path: Path) -> None:
    options = ("--sizes", "0.5m", "--repetitions", "2", "--warmup", "2", "--json", str(tmp_path / "rows.json"))
    assert main(["micro_batches", *options]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in rows] == ["accumulation", "micro_batches"]
    assert all(row["correct"] and row["figures"]["over_accumulation"] > 0 for row in rows)
    assert {row["settings"]["numel"] for row in rows} == {525_312}
