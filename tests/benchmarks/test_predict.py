"""``python -m benchmarks predict`` on rows that a known model made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.predict import CostModel, Options, Point, fit, leave_out, measured_points
from benchmarks.harness.records import Record, RowFile

NUMELS = (1_000, 16_000, 250_000, 1_000_000, 4_000_000)
NONE, FP16, INT8 = METHODS = tuple(f"fastsync.attach/{wire}" for wire in ("none", "fp16", "int8"))
MODEL = CostModel(100e-6, 8e-8, {NONE: (4e-9, 20e-6), FP16: (2e-9, 30e-6), INT8: (3e-9, 40e-6)})
"""Of a link of 100 Mbit/s."""


def made_points(world_sizes: tuple[int, ...] = (2, 4, 8)) -> list[Point]:
    return [
        Point(method, numel, ranks, MODEL.sync_time(method, numel, ranks))
        for method in METHODS
        for numel in NUMELS
        for ranks in world_sizes
    ]


def made_rows(world_sizes: tuple[int, ...] = (2, 4, 8), slower_at_8: float = 1.0, **more: object) -> Iterator[Record]:
    for point in made_points(world_sizes):
        settings = {"size": str(point.numel), "numel": point.numel, "world_size": point.num_ranks, "backend": "gloo"}
        added = point.seconds * (slower_at_8 if point.num_ranks == 8 else 1.0)
        yield Record("sync", "no_sync", settings | more, {}, True, [0.5] * 3, {})
        yield Record("sync", point.method, settings | more, {}, True, [0.5 + added] * 3, {})


def predict(*arguments: str | Path) -> int:
    return main(["predict", *map(str, arguments), "--compression", "none", "fp16", "int8"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    RowFile(tmp_path / "rows.json").add(made_rows(link=10**8))
    return tmp_path / "rows.json"


def test_exact_rows_give_back_the_model_that_made_them():
    found = fit(made_points())
    assert found.latency == pytest.approx(MODEL.latency)
    assert found.per_byte == pytest.approx(MODEL.per_byte)
    assert dict(found.hosts) == {method: pytest.approx(host) for method, host in MODEL.hosts.items()}
    assert all(error < 1e-6 for _, error in leave_out(made_points()))


def shown(said: str) -> dict[tuple[str, str, str], list[float]]:
    """The percentages of each method, link and number of ranks."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if "│" in line]
    return {
        (method, link, ranks): [float(text) / 100 for text in re.findall(r"([\d.]+)%", " ".join(rest))]
        for method, link, ranks, *rest in rows
    }


def test_figures_come_with_the_error_of_unseen_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "rows.json").add(made_rows(slower_at_8=1.25))
    job = ("--numel", "1000000", "--compute-time", "0.1", "--world-sizes", "2", "8", "1024")
    assert predict(tmp_path / "rows.json", *job) == 0
    said = capsys.readouterr().out
    assert "How far to trust it" in said
    assert "4,000,000 values: median" in said
    found = shown(said)
    assert found.keys() == {(method, "as fitted", ranks) for method in METHODS for ranks in ("2", "8", "1024*")}
    for (method, _, ranks), (efficiency, low, high) in found.items():
        assert 0 <= low < efficiency < high < 1
        if ranks == "8":  # measured 1.25 times as slow as the other world sizes foretell
            measured = 0.1 / (0.1 + 1.25 * MODEL.sync_time(method, 1_000_000, 8))
            assert low <= measured <= high


def test_it_says_in_sentences_what_it_means_and_draws_it(rows: Path, capsys: pytest.CaptureFixture[str]):
    job = ("--numel", "1000000", "--bucket-mb", "4", "--compute-time", "0.1", "--world-sizes", "2", "4", "64")
    assert predict(rows, *job) == 0
    said = capsys.readouterr().out
    exposed = 1e3 * MODEL.sync_time(INT8, 1_000_000, 4)
    assert f"With 4 ranks over the measured link a step with {INT8} takes about {100 + exposed:.0f} ms," in said
    assert f" {exposed:.0f} ms of it exposed communication." in said
    assert f"Efficiency is {100 / (100 + exposed):.1%}, and between" in said
    assert "No row has more than 8 ranks, so for 64 this is a guess from fewer." in said
    assert "It does not know your step: that one computes for 100 ms is given, not measured." in said
    assert "Picture: prediction.png" in said
    assert Path("prediction.png").read_bytes().startswith(b"\x89PNG")


def test_measured_points_are_those_of_the_rows():
    """Where the model is exact, it goes through them, and where syncs were slower, they are below it."""
    options = Options((Path("rows.json"),), numel=1_000_000, compute_time=0.1, bucket_mb=4)
    slow = [replace(point, seconds=2 * point.seconds) if point.num_ranks == 4 else point for point in made_points()]
    nearest, measured = measured_points(options, MODEL, slow)
    assert nearest == 1_000_000
    for method in METHODS:
        times = [1, 2, 1]  # of 2, 4 and 8 ranks
        expected = [
            (ranks, 0.1 / (0.1 + many * MODEL.sync_time(method, 1_000_000, ranks)))
            for ranks, many in zip((2, 4, 8), times, strict=True)
        ]
        assert measured[method] == [(ranks, pytest.approx(efficiency)) for ranks, efficiency in expected]


def test_another_link_tells_where_compression_pays(rows: Path, capsys: pytest.CaptureFixture[str]):
    job = ("--numel", "4000000", "--compute-time", "0.1", "--world-sizes", "2")
    assert predict(rows, *job, "--bandwidth", "10mbit", "10gbit") == 0
    found = {case[:2]: efficiencies[0] for case, efficiencies in shown(capsys.readouterr().out).items()}
    assert found[INT8, "10mbit"] > found[FP16, "10mbit"] > found[NONE, "10mbit"]
    assert found[INT8, "10mbit"] / found[NONE, "10mbit"] > 3
    assert found[INT8, "10gbit"] / found[NONE, "10gbit"] < 1.5


def test_rows_that_allow_no_fit_are_refused(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "fast.json").add(made_rows(link=10**9))
    assert predict(rows, tmp_path / "fast.json") == 2
    assert "rows are of several links, 100000000, 1000000000: name files of one" in capsys.readouterr().err
    RowFile(tmp_path / "two.json").add(made_rows((2,)))
    assert predict(tmp_path / "two.json") == 2
    assert "two world sizes above 1 are needed" in capsys.readouterr().err
