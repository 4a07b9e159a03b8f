"""``python -m benchmarks predict`` on rows that a known model made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.predict import CostModel, Job, Point, errors_near, fit, leave_out
from benchmarks.harness.records import Record, RowFile

NUMELS = (1_000, 16_000, 250_000, 1_000_000, 4_000_000)
NONE, FP16, INT8 = WAYS = tuple(f"fastsync.attach/{wire}" for wire in ("none", "fp16", "int8"))
MODEL = CostModel(100e-6, 8e-8, {NONE: (4e-9, 20e-6), FP16: (2e-9, 30e-6), INT8: (3e-9, 40e-6)})
"""Of a link of 100 Mbit/s."""


def made_points(world_sizes: tuple[int, ...] = (2, 4, 8)) -> list[Point]:
    return [
        Point(way, numel, ranks, MODEL.sync_time(way, numel, ranks))
        for way in WAYS
        for numel in NUMELS
        for ranks in world_sizes
    ]


def made_rows(world_sizes: tuple[int, ...] = (2, 4, 8), slower_at_8: float = 1.0, **more: object) -> Iterator[Record]:
    for point in made_points(world_sizes):
        settings = {"size": str(point.numel), "numel": point.numel, "world_size": point.num_ranks, "backend": "gloo"}
        added = point.seconds * (slower_at_8 if point.num_ranks == 8 else 1.0)
        yield Record("sync", "no_sync", settings | more, {}, True, [0.5] * 3, {})
        yield Record("sync", point.way, settings | more, {}, True, [0.5 + added] * 3, {})


def predict(*arguments: str | Path) -> int:
    return main(["predict", *map(str, arguments), "--compression", "none", "fp16", "int8"])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    RowFile(tmp_path / "rows.json").add(made_rows(link=10**8))
    return tmp_path / "rows.json"


def test_exact_rows_give_back_the_model_that_made_them():
    found = fit(made_points())
    assert found.latency == pytest.approx(MODEL.latency)
    assert found.per_byte == pytest.approx(MODEL.per_byte)
    assert dict(found.hosts) == {way: pytest.approx(host) for way, host in MODEL.hosts.items()}
    assert all(left.error < 1e-6 for left in leave_out(made_points()))


def test_figures_come_with_the_error_of_unseen_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "rows.json").add(made_rows(slower_at_8=1.25))
    job = ("--numel", "1000000", "--compute-time", "100ms", "--world-sizes", "2", "8", "1024")
    assert predict(tmp_path / "rows.json", *job, "--json", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert "How far to trust it" in said
    assert "4,000,000 values: median" in said
    for row in json.loads((tmp_path / "out.json").read_text()):
        figures, ranks = row["figures"], row["settings"]["world_size"]
        assert row["settings"]["extrapolated"] == (ranks == 1024)
        assert f"{ranks}*" in said if ranks == 1024 else f"{ranks}*" not in said
        assert 0 <= figures["low"] < figures["efficiency"] < figures["high"] < 1
        if ranks == 8:  # measured 1.25 times as slow as the other world sizes foretell
            measured = 0.1 / (0.1 + 1.25 * MODEL.sync_time(row["way"], 1_000_000, 8))
            assert figures["low"] <= measured <= figures["high"]


def test_the_worst_error_is_of_messages_of_about_that_size():
    points = [
        Point(p.way, p.numel, p.num_ranks, p.seconds * (2.0 if p.numel == 1_000 and p.num_ranks == 8 else 1.0))
        for p in made_points()
    ]
    left_out = leave_out(points)
    assert max(errors_near(left_out, 4_000_000)) < 0.1
    assert max(errors_near(left_out, 1_000)) > 0.4


def test_backward_hides_all_but_the_last_bucket():
    job, one = Job(10_000_000, compute=100.0, num_buckets=10), Job(10_000_000, compute=100.0, num_buckets=1)
    link, host = MODEL.link_time(NONE, 1_000_000, 4), MODEL.host_time(NONE, 1_000_000)
    assert MODEL.exposed_time(NONE, job, 4) == pytest.approx(link + 10 * host)
    assert MODEL.exposed_time(NONE, one, 4) == pytest.approx(MODEL.sync_time(NONE, 10_000_000, 4))
    # Where nothing is hidden any more, all of the link counts.
    fast = Job(10_000_000, compute=1e-9, num_buckets=10)
    assert MODEL.exposed_time(NONE, fast, 4) == pytest.approx(10 * (link + host))


def test_another_link_tells_where_compression_pays(rows: Path, tmp_path: Path):
    job = ("--numel", "4000000", "--compute-time", "100ms", "--world-sizes", "2", "--json", str(tmp_path / "out.json"))
    assert predict(rows, *job, "--bandwidth", "10mbit", "10gbit") == 0
    found = {
        (row["settings"]["bandwidth"], row["way"]): row["figures"]["efficiency"]
        for row in json.loads((tmp_path / "out.json").read_text())
    }
    assert found["10mbit", INT8] > found["10mbit", FP16] > found["10mbit", NONE]
    assert found["10mbit", INT8] / found["10mbit", NONE] > 3
    assert found["10gbit", INT8] / found["10gbit", NONE] < 1.5


def test_two_world_sizes_leave_out_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "rows.json").add(made_rows((2, 4), oversubscribed=True))
    assert predict(tmp_path / "rows.json") == 0
    assert "some of more ranks than cores (OVERSUBSCRIBED)" in " ".join(capsys.readouterr().out.split())


def test_rows_that_allow_no_fit_are_refused(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RowFile(tmp_path / "fast.json").add(made_rows(link=10**9))
    assert predict(rows, tmp_path / "fast.json") == 2
    assert "rows are of several links, 100000000, 1000000000: choose one with --link" in capsys.readouterr().err
    assert predict(rows, tmp_path / "fast.json", "--link", "1gbit") == 0
    RowFile(tmp_path / "two.json").add(made_rows((2,)))
    assert predict(tmp_path / "two.json") == 2
    assert "two world sizes above 1 are needed" in capsys.readouterr().err
    assert main(["predict", str(rows), "--compression", "bf16"]) == 2
    assert "there are no rows of fastsync.attach/bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "there is no file nowhere.json"),
        (["--bandwidth", "fast"], "expected a number and a unit"),
        (["--compute-time", "10"], "'10' is not a time"),
        (["--world-sizes", "1"], "1 must be 2 or more"),
        (["--bucket-mb", "0"], "bucket_mb=0.0 must be more than 0"),
    ],
)
def test_bad_options(rows: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["predict", *([] if arguments[0].endswith(".json") else [str(rows)]), *arguments])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
