"""``python -m benchmarks overhead``: what is counted, on real ranks, and what is made of it; nothing about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.overhead import DDP, Overhead, to_records
from tests.benchmarks.rows import WHERE

pytestmark = pytest.mark.end_to_end

HOOK, ATTACH = "fastsync.register_comm_hook/none", "fastsync.attach/fp16"


def test_overhead_counts_launches_and_group_calls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTSYNC_SHARED_MEMORY", "0")  # where no call of the group is needed
    path = tmp_path / "rows.json"
    options = ("--device", "cpu", "--sizes", "5k", "--repetitions", "3", "--warmup", "2", "--ways", HOOK, ATTACH)
    assert main(["overhead", *options, "--json", str(path)]) == 0
    said = capfd.readouterr().out
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert rows.keys() == {DDP, HOOK, ATTACH}
    for way, row in rows.items():
        assert way in said
        assert row["correct"]
        assert len(row["samples"]) == 3
        settings, figures = row["settings"], row["figures"]
        assert (settings["size"], settings["world_size"], settings["num_tensors"]) == ("5k", 2, 6)
        assert figures["host_time"] == row["quantiles"]["median"] > 0
        assert figures["launches"] > 10
        assert figures["peak_memory"] is None
    assert rows[DDP]["figures"]["group_calls"] == 1  # one bucket, one all_reduce
    assert rows[HOOK]["figures"]["group_calls"] >= 1
    assert rows[DDP]["figures"]["host_over_ddp"] == 0


def test_rows_are_of_the_rank_for_which_it_is_most():
    of_rank = [
        {
            DDP: Overhead(True, [1.0, 3.0, 2.0], launches=5, group_calls=1, peak_memory=100),
            HOOK: Overhead(True, [2.0, 1.0, 1.0], launches=4 + rank, group_calls=2, peak_memory=80 + rank),
            ATTACH: Overhead(rank == 0, [9.0 * rank] * 3, launches=1, group_calls=1, peak_memory=90),
        }
        for rank in range(2)
    ]
    rows = {record.way: record for record in to_records(of_rank, {"size": "5k"}, WHERE)}
    assert rows[DDP].figures["host_time"] == 2.0
    assert rows[HOOK].figures == {
        "host_time": 1.0,
        "launches": 5,
        "group_calls": 2,
        "peak_memory": 81,
        "host_over_ddp": -1.0,
        "memory_over_ddp": -19,
    }
    assert rows[ATTACH].samples == [9.0, 9.0, 9.0]
    assert [rows[way].correct for way in (DDP, HOOK, ATTACH)] == [True, True, False]
