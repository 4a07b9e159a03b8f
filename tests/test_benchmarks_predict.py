"""``python -m benchmarks predict`` on rows that a known model made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import benchmarks.commands.predict
from benchmarks.__main__ import main
from benchmarks.commands.predict import Options
from benchmarks.cost.model import CostModel, Host, Job, Link, Topology, efficiency, slower
from benchmarks.harness.records import Record, RowFile

NUMELS = (1_000, 16_000, 250_000, 1_000_000, 4_000_000)
WAYS = ("fastsync.attach/none", "fastsync.attach/fp16")
MODEL = CostModel(
    Topology("ring", Link(latency=100e-6, bandwidth=12.5e6)),
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
    assert "ahead of fastsync.attach/none over any link" in capsys.readouterr().out


def rows_with_errors(factor_at_8: float) -> Iterator[Record]:
    """At 8 ranks every sync takes that many times what the model says."""
    for record in made_rows((2, 4, 8), link=10**8):
        is_off = record.settings["world_size"] == 8 and record.way != "no_sync"
        yield replace(record, samples=[1e-3 + (record.samples[0] - 1e-3) * factor_at_8] * 3) if is_off else record


def test_the_band_holds_what_was_measured_though_backward_hides_most_of_it(tmp_path: Path):
    """Ten buckets, of which backward hides about all: ± 10 % of the link is far more than ± 10 % of what is exposed."""
    RowFile(tmp_path / "rows.json").add(rows_with_errors(1.1))
    job = Job(10 * 250_000, compute_time=1.5 * 10 * MODEL.link_time(WAYS[0], 250_000, 8), num_buckets=10)
    arguments = (
        "--hold-back",
        "8",
        "--world-sizes",
        "8",
        "--numel",
        str(job.numel),
        "--bucket-mb",
        str(2**-20 * 10**6),
    )
    options = (*arguments, "--compute-time", f"{job.compute_time:.6f}s", "--json", str(tmp_path / "out.json"))
    assert predict(str(tmp_path / "rows.json"), *options) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    figures = next(row["figures"] for row in written if row["way"] == WAYS[0] and "efficiency" in row["figures"])
    assert figures["worst_error"] == pytest.approx(0.1 / 1.1, rel=0.02)
    measured = efficiency(job, MODEL.exposed_time(WAYS[0], job, 8, 1.1))
    exposed_alone = efficiency(job, MODEL.exposed_time(WAYS[0], job, 8) * 1.1)
    assert figures["low"] == pytest.approx(measured, rel=2e-3)
    assert figures["low"] < exposed_alone - 0.02


def test_compute_does_not_make_errors_look_smaller(tmp_path: Path):
    """A sync of a small message that is twice as slow as predicted, next to a step a hundred times as long."""
    slow = [replace(record, samples=[seconds + 0.5 for seconds in record.samples]) for record in rows_with_errors(2.0)]
    RowFile(tmp_path / "rows.json").add(slow)
    options = ("--hold-back", "8", "--json", str(tmp_path / "out.json"))
    assert predict(str(tmp_path / "rows.json"), *options) == 0
    held_back = [row for row in json.loads((tmp_path / "out.json").read_text()) if row["settings"].get("held_back")]
    assert [row["figures"]["error"] for row in held_back] == pytest.approx([-0.5] * 10, abs=0.01)


def test_factors_are_those_that_lead_back_from_a_prediction():
    assert slower(0.0) == (1, 1)
    for error in (-0.5, 0.5):  # measured 1, predicted 1 + error
        fast, slow = slower(0.5)
        assert fast * (1 + error) <= 1 <= slow * (1 + error)
    assert slower(1.0) == (0.5, math.inf)
    assert slower(math.inf) == (0, math.inf)


def test_crossovers_are_as_unsure_as_what_they_compare():
    job = Job(1_000_000, 0.1)
    fp16, none = WAYS[1], WAYS[0]
    low, high = MODEL.crossover_range(fp16, none, job, 4, 0.05)
    assert low < MODEL.crossover(fp16, none, job, 4) < high
    assert MODEL.crossover_range(fp16, none, job, 4, 1.0) == (0, math.inf)


def test_what_was_measured_oversubscribed_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    crowded = [
        replace(record, settings={**record.settings, "oversubscribed": True})
        if record.settings["world_size"] == 8
        else record
        for record in made_rows((2, 4, 8))
    ]
    RowFile(tmp_path / "rows.json").add(crowded)
    out = tmp_path / "out.json"
    assert predict(str(tmp_path / "rows.json"), "--hold-back", "8", "--json", str(out)) == 0
    assert "8, OVERSUBSCRIBED" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert all(row["settings"]["oversubscribed"] for row in written if row["settings"].get("held_back"))
    assert not any(row["settings"].get("fitted_on_oversubscribed") for row in written)
    assert predict(str(tmp_path / "rows.json"), "--json", str(out)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "at 2, 4, 8 ranks, 10 of them OVERSUBSCRIBED" in said
    assert "fitted on OVERSUBSCRIBED ranks" in said


def test_ways_that_were_held_back_alone_leave_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [row for row in made_rows((2, 4, 8)) if (row.way != WAYS[0]) == (row.settings["world_size"] == 8)]
    alone = [row for row in made_rows((2, 4)) if row.way == "no_sync"]
    RowFile(tmp_path / "rows.json").add([*records, *alone])
    assert predict(str(tmp_path / "rows.json"), "--hold-back", "8") == 2
    assert "hold_back: nothing left to check" in capsys.readouterr().err


def test_a_link_without_cost_is_valid_json(capsys: pytest.CaptureFixture[str]):
    """As a fit may find it where syncs take as long whatever their size."""
    given = {"bandwidth": "1gbit", "latency": "1us", "overhead": "1us", "local_bandwidth": 1.0}
    options = Options(compression=("none",), world_sizes=(2, 4), **given)
    model = CostModel(Topology("ring", Link(latency=1e-3, bandwidth=math.inf)), {WAYS[0]: Host(1e-6, math.inf)})
    predictions = list(benchmarks.commands.predict.predict(options, model, None))
    json.dumps([asdict(record) for record in predictions], allow_nan=False)
    benchmarks.commands.predict.report(options, model, None, [], predictions)
    assert "1 ms a step, no measurable cost a byte" in capsys.readouterr().out


def test_without_rows_everything_is_assumed_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ("--bandwidth", "25gbit", "--latency", "10us", "--local-bandwidth", "2000", "--overhead", "30us")
    levels = ("--algorithm", "two-level", "--world-sizes", "1", "4", "12", "64")
    assert main(["predict", *given, *levels, "--compression", "int8", "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "error: unknown" in said
    assert "int8 is sent from rank to rank" in said
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
        (["--bucket-mb", "0"], "bucket_mb=0.0 must be more than 0"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["predict", *arguments])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
