"""``python -m benchmarks predict`` on rows that a known model made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cost_model import CostModel, Host, Link, Topology
from benchmarks.records import Record, RowFile

NUMELS = (1_000, 16_000, 250_000, 1_000_000, 4_000_000)
WAYS = ("fastsync.attach/none", "fastsync.attach/fp16")
MODEL = CostModel(
    Topology("gloo", Link(latency=100e-6, bandwidth=12.5e6)),
    {WAYS[0]: Host(20e-6, 8e9), WAYS[1]: Host(30e-6, 4e9)},
)


def made_rows(world_sizes: tuple[int, ...], **more: object) -> Iterator[Record]:
    for num_ranks in world_sizes:
        for numel in NUMELS:
            settings = {"size": str(numel), "numel": numel, "world_size": num_ranks, "backend": "gloo", **more}
            where = {"cores": 64, "gpu": None}
            yield Record("sync", "no_sync", settings, {}, True, [1e-3], where)
            for way in WAYS:
                seconds = 1e-3 + MODEL.sync_time(way, numel, num_ranks)
                yield Record("sync", way, settings, {}, True, [seconds] * 3, where)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    RowFile(tmp_path / "rows.json").add(made_rows((2, 4, 8), link=10**8))
    return tmp_path / "rows.json"


def predict(*arguments: str) -> int:
    return main(["predict", *arguments, "--compression", "none", "fp16"])


def test_figures_come_with_their_error(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = ("--numel", "1000000", "--compute-time", "100ms", "--world-sizes", "1", "8", "1024")
    assert predict(str(rows), "--hold-back", "8", *job, "--json", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert "100 µs a step, 100 Mbit/s" in said
    assert "of 10 points held back never fitted on" in said
    written = json.loads((tmp_path / "out.json").read_text())
    held_back = [row for row in written if row["settings"].get("held_back")]
    assert len(held_back) == len(NUMELS) * len(WAYS)
    assert all(row["settings"]["world_size"] == 8 and abs(row["figures"]["error"]) < 0.01 for row in held_back)
    predictions = {
        (row["way"], row["settings"]["world_size"]): row for row in written if "efficiency" in row["figures"]
    }
    assert list(predictions) == [(way, size) for way in WAYS for size in (1, 8, 1024)]
    for (way, num_ranks), row in predictions.items():
        figures = row["figures"]
        assert 0 <= figures["median_error"] <= figures["worst_error"] < 0.01
        assert figures["low"] <= figures["efficiency"] <= figures["high"]
        # 8 is beyond 2 and 4, which the model was fitted on.
        assert row["settings"]["extrapolated"] == (num_ranks > 4)
        sync = MODEL.sync_time(way, 1_000_000, num_ranks) if num_ranks > 1 else 0.0
        assert figures["efficiency"] == pytest.approx(0.1 / (0.1 + sync), rel=0.01)
        assert f"{num_ranks}{'*' if num_ranks > 4 else ''}" in said
    assert "Assumed: one bucket" in said


def test_the_crossover_is_told_with_both_sides(rows: Path, capsys: pytest.CaptureFixture[str]):
    assert predict(str(rows), "--numel", "1000000", "--compute-time", "100ms", "--world-sizes", "4") == 0
    assert "fastsync.attach/fp16 at 4 ranks: pays below" in capsys.readouterr().out
    assert predict(str(rows), "--overhead", "1us", "--local-bandwidth", "5", "--world-sizes", "4") == 0
    assert "ahead of none over any link" in capsys.readouterr().out


def test_without_rows_everything_is_assumed_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--bandwidth", "25gbit", "--latency", "10us", "--local-bandwidth", "2000", "--overhead", "30us")
    levels = ("--algorithm", "two-level", "--world-sizes", "1", "4", "12", "64")
    assert main(["predict", *given, *levels, "--compression", "int8", "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "error: unknown" in said
    assert "int8 is one byte" in said
    written = {row["settings"]["world_size"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert list(written) == [1, 4, 64]  # 12 ranks do not fill nodes of 8
    assert written[64]["settings"]["extrapolated"]
    assert written[64]["figures"]["worst_error"] is None
    assert written[64]["figures"]["exposed_time"] > written[4]["figures"]["exposed_time"] > 0


def test_rows_of_several_links_take_a_choice(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "fast.json").add(made_rows((2, 4), link=10**9))
    assert predict(str(rows), str(tmp_path / "fast.json")) == 2
    assert "the rows are of several links, 1 Gbit/s, 100 Mbit/s: choose one with --link" in capsys.readouterr().err
    assert predict(str(rows), str(tmp_path / "fast.json"), "--link", "1gbit", "--world-sizes", "2") == 0
    assert "at 2, 4 ranks" in capsys.readouterr().out
    assert predict(str(rows), "--link", "10gbit") == 2
    assert "no rows of sync over that link" in capsys.readouterr().err


def test_rows_of_one_world_size_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "two.json").add(made_rows((2,)))
    assert predict(str(tmp_path / "two.json")) == 2
    assert "two world sizes above 1 are needed" in capsys.readouterr().err


def test_what_was_not_measured_is_named(rows: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", str(rows), "--compression", "bf16"]) == 2
    assert "there are no rows of fastsync.attach/bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "there is no file nowhere.json"),
        ([], "give --bandwidth, --latency, --local-bandwidth, --overhead as well"),
        (["--bandwidth", "fast"], "expected a number and a unit"),
        (["--latency", "10"], "'10' is not a time"),
        (["--world-sizes", "2048"], "2048 must be from 1 to 1024"),
        (["--hold-back", "8"], "give --bandwidth"),
        (["--bucket-mb", "0"], "bucket_mb=0.0 must be above 0"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["predict", *arguments])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
