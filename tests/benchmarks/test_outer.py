"""The benchmark of training between sites, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commands import outer
from benchmarks.harness.records import read_json


@pytest.mark.usefixtures("namespaces")
def test_outer_steps_send_less_than_steps(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    options = ["--rate", "1gbit", "--sites", "2", "--numel", "200000", "--rounds", "1", "--step-time", "0.001"]
    ways = ["ddp", "fastsync.DiLoCo/int8+ef, H=50", "fastsync.DiLoCo/topk, H=30"]
    assert outer.main([*options, "--ways", *ways, "--json", str(path)]) == 0
    sent = {record.way: record.figures["bytes_a_step"] for record in read_json(path)}
    assert sent[ways[2]] < sent[ways[1]] < sent[ways[0]] / 50
