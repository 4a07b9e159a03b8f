"""Scaling: efficiency and breakdown of known times, refusals, and real launches of tiny steps."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from benchmarks.__main__ import main
from benchmarks.commands import scaling
from benchmarks.commands.scaling import compute_figures
from benchmarks.harness.records import Record, read_json
from benchmarks.report.efficiency import points, reference
from tests.benchmarks.rows import step_row

pytestmark = pytest.mark.end_to_end

TINY = ("--methods", "fastsync.attach/none", "--model", "mlp", "--batch-size", "2", "--steps", "2", "--warmup", "2")
# What follows from times.


def test_all_methods_are_relative_to_the_plain_step_and_without_it_to_the_fastest():
    steps_of = {"ddp": (1.25, 2.0), "fastsync.attach/none": (1.0, 1.6), "no_ddp": (0.5, 0.75)}
    rows = [step_row(n, [steps_of[method][n - 1]] * 3, method=method) for method in steps_of for n in (1, 2)]
    assert [point.efficiency.value for point in points(rows)] == [0.4, 0.25, 0.5, 0.3125]
    assert reference(rows) == ("a step without communication on 1 rank", 0.5)
    without = [row for row in rows if row.method != "no_ddp"]
    assert [point.efficiency.value for point in points(without)] == [0.8, 0.5, 1.0, 0.625]
    assert reference(without) == ("fastsync.attach/none on 1 rank", 1.0)


def test_the_parts_of_a_step_add_up_to_it():
    rows = [
        step_row(n, [step + 0.01 * launch] * 3, launch=launch, compute=compute, stragglers=stragglers)
        for n, step, compute, stragglers in ((1, 1.0, 0.75, 0.0), (2, 1.7, 0.9, 0.2), (4, 1.1, 1.0, 0.3))
        for launch in range(3)
    ]
    one, two, four = points(rows)
    for point in (one, two, four):
        assert point.contention is not None
        assert point.compute == 0.75
        assert point.compute + point.contention + point.stragglers + point.exposed == pytest.approx(
            point.step.value, rel=1e-12
        )
    assert (one.contention, one.stragglers) == (0.0, 0.0)
    assert (two.contention, two.stragglers) == (pytest.approx(0.15), 0.2)
    assert two.exposed == pytest.approx(1.71 - 0.75 - 0.15 - 0.2)
    assert four.exposed < 0  # noise, which is shown as what it is


def test_in_strong_scaling_a_fair_share_of_compute_is_its_nth_part():
    rows = [
        step_row(1, [1.0] * 3, compute=0.75, scaling="strong"),
        step_row(2, [0.8] * 3, compute=0.5, scaling="strong"),
    ]
    point = points(rows)[1]
    assert (point.compute, point.contention) == (0.375, 0.125)


def test_rows_of_several_jobs_are_not_held_against_each_other():
    rows = [step_row(1, [1.0] * 3), step_row(2, [1.25] * 3)]
    strong = [step_row(n, [1.0] * 3, scaling="strong") for n in (1, 2)]
    with pytest.raises(ValueError, match=r"several jobs, weak scaling of mlp .* 8 samples a rank over gloo; strong"):
        points([*rows, *strong])
    other = replace(rows[1], settings={**rows[1].settings, "batch_size": 9})
    with pytest.raises(ValueError, match="the rows are of several jobs"):
        points([rows[0], other])


def test_what_is_wrong_makes_no_point():
    rows = [step_row(1, [1.0] * 3), step_row(2, [], correct=False), step_row(2, [1.0], correct=False, launch=1)]
    assert [point.world_size for point in points(rows)] == [1]
    assert points([]) == []


def test_compute_is_the_mean_of_the_ranks_and_stragglers_are_what_the_slowest_takes_more():
    assert compute_figures([[1.0, 1.0], [4.0, 2.0], [1.0, 3.0]]) == {"compute": 2.0, "stragglers": 1.5}


# The command, with launches that are made up.


def made_up_launches(monkeypatch: pytest.MonkeyPatch, *endings: list[Record] | BaseException) -> list[int]:
    """Has launches on a machine of two cores end as told. Returns their numbers of ranks, once there have been some."""
    sizes: list[int] = []

    def launch(fn: object, nproc: int, *arguments: object, stop_timeout: float) -> list[list[Record]]:
        sizes.append(nproc)
        ending = endings[len(sizes) - 1]
        if isinstance(ending, BaseException):
            raise ending
        return [ending] * nproc

    monkeypatch.setattr("fastsync._C.num_usable_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(scaling, "launch_ranks", launch)
    return sizes


def test_world_sizes_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [[step_row(n, [1.0], scaling="strong")] for n in (1, 2, 4)] * 2
    sizes = made_up_launches(monkeypatch, *rows)
    options = ("--world-sizes", "4,1,2", "--repetitions", "2", "--batch-size", "8", "--strong", "--oversubscribe")
    assert main(["scaling", *options, "--report", str(tmp_path / "report")]) == 0
    assert sizes == [1, 2, 4, 1, 2, 4]
    assert [row.settings["world_size"] for row in read_json(tmp_path / "report/rows.json")] == [1, 2, 4] * 2


@pytest.mark.parametrize(
    ("ending", "status", "note"),
    [
        (SignalException("", signal.SIGTERM), 143, "interrupted"),
        (ChildFailedError("x", {1: ProcessFailure(1, 7, 1, "/nowhere")}), 1, "rank 1 failed first"),
        ([step_row(2, [], correct=False)], 1, "WRONG: ddp at"),
    ],
)
def test_whatever_ends_it_the_report_of_what_there_is_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: list[Record] | BaseException,
    status: int,
    note: str,
):
    made_up_launches(monkeypatch, [step_row(1, [1.0])], ending)
    folder = tmp_path / "report"
    assert main(["scaling", "--world-sizes", "1", "2", "--repetitions", "1", "--report", str(folder)]) == status
    assert len([row for row in read_json(folder / "rows.json") if row.correct]) == 1
    assert note in capsys.readouterr().out
    assert note in (folder / "index.html").read_text()


# Real launches.


def test_it_launches_ranks(tmp_path: Path):
    folder = tmp_path / "report"
    options = ("--world-sizes", "1", "2", "--repetitions", "1", "--oversubscribe", "--report", str(folder))
    assert main(["scaling", *TINY, *options]) == 0
    rows = read_json(folder / "rows.json")
    cases = [(n, method) for n in (1, 2) for method in ("no_ddp", "fastsync.attach/none")]
    assert [(row.settings["world_size"], row.method) for row in rows] == cases
    assert all(row.correct and len(row.samples) == 2 and row.figures["overhead"] > 0 for row in rows)
    assert "fastsync.attach/none on 2 ranks" in (folder / "index.html").read_text()
