"""What a run leaves behind and says: logs that go on after a resumption, lines, the dashboard, the table."""

from __future__ import annotations

import csv
import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.console import Dashboard, Lines, format_share, result_table
from fastsync.ppo.runs.metrics import Episode, EpisodeWindow, GpuUse, PhaseTimes, RankReport, Status, TrainResult
from fastsync.ppo.runs.report import RunReport
from fastsync.ppo.runs.straggler import WaitingTimes
from fastsync.ppo.sync import SyncReport
from fastsync.wording import format_bytes

SETTINGS = Settings(total_steps=1000)


def status_at(update: int, world_size: int = 2, first_episode: int = 3) -> Status:
    """After so many updates of 100 steps and 2 seconds, the last rank being slow; from some update on episodes end."""
    window = EpisodeWindow()
    reports = [
        RankReport(
            PhaseTimes(1.0 + rank, 0.5, 0.25, 2.0 - rank),
            wire_bytes=1e6,
            gpu=GpuUse(2e9, 0.5) if rank else GpuUse(),
            episodes=[Episode(0, 10.0 * update, 5)] if update >= first_episode else [],
            metrics={"learning/policy_loss": float(rank), "learning/learning_rate": 1.0 / update},
        )
        for rank in range(world_size)
    ]
    window.extend(reports)
    return Status(100 * update, 2.0 * update, update, window, reports)


def run(folder: Path, updates: range, *, world_size: int = 2, resumed_update: int = 0, finish: bool = False) -> None:
    with RunReport(
        folder,
        SETTINGS,
        world_size,
        475.0,
        resumed_step=100 * resumed_update,
        resumed_seconds=2.0 * resumed_update,
        notes=["[one] note"],
    ) as report:
        for update in updates:
            report.update(status_at(update, world_size))
        if finish:
            sync = SyncReport(seconds=2.0, exposed_seconds=1.0, wire_bytes=3e6)
            report.finish(TrainResult(1000, 20.0, [100.0], sync))


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def make_events_older(folder: Path) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second that they were made in."""
    (file,) = folder.glob("events.out.tfevents.*")
    file.rename(folder / "events.out.tfevents.0000000001.host.1.0")


def test_logs_hold_each_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, range(1, 11), finish=True)
    rows = read_csv(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(100, 1001, 100))
    first, last = rows[0], rows[-1]
    assert first["episodes/return"] == ""
    assert (last["episodes/return"], last["episodes/length"], last["update"]) == ("100.0", "5.0", "10")
    assert (last["learning/policy_loss"], last["learning/learning_rate"]) == ("0.5", "0.1")
    assert (last["rank0/environment_seconds"], last["rank1/environment_seconds"]) == ("1.0", "2.0")
    assert (last["rank0/waiting_seconds"], last["rank1/waiting_seconds"]) == ("1.0", "0.0")
    assert (last["rank0/gpu_memory"], last["rank1/gpu_memory"]) == ("", "2000000000.0")
    assert last["speed/steps_per_second"] == "50.0"

    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in log.Scalars("episodes/return")] == list(range(300, 1001, 100))
    assert log.Scalars("rank0/waiting_seconds")[-1].value == 1.0
    assert "rank0/gpu_memory" not in log.Tags()["scalars"]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")

    said = capsys.readouterr().out
    assert said.startswith("[one] note\n")
    assert said.splitlines()[-1] == f"written to {tmp_path}"
    # 2 s of 4.75 are waited by one of two ranks.
    assert "rank 1 makes the others wait in environment: 10.0 s" in " ".join(said.replace("│", " ").split())


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, range(1, 9))
    make_events_older(tmp_path)
    whole = read_csv(tmp_path)
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("900,18.0,9")  # killed while writing

    drawn: list[list[int]] = []
    monkeypatch.setattr(
        "fastsync.ppo.runs.report.draw_learning_curve",
        lambda path, points, **rest: drawn.append([point.step for point in points]),
    )
    run(tmp_path, range(6, 11), resumed_update=5, finish=True)
    rows = read_csv(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(100, 1001, 100))
    assert rows[:8] == whole
    assert not list(tmp_path.glob("*.tmp"))
    assert drawn == [list(range(300, 1001, 100))]
    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in log.Scalars("seconds")] == list(range(100, 1001, 100))


def test_a_file_that_ends_within_a_row_keeps_the_rows_before(tmp_path: Path):
    run(tmp_path, range(1, 4))
    file = tmp_path / "progress.csv"
    file.write_bytes(file.read_bytes()[:-3])
    run(tmp_path, range(4, 5), resumed_update=3)
    assert [int(row["step"]) for row in read_csv(tmp_path)] == [100, 200, 400]


def test_another_number_of_ranks_keeps_the_columns(tmp_path: Path):
    run(tmp_path, range(1, 4), world_size=2)
    run(tmp_path, range(4, 6), world_size=3, resumed_update=3)
    run(tmp_path, range(6, 8), world_size=1, resumed_update=5)
    rows = read_csv(tmp_path)
    ranks = [sum(bool(row[f"rank{rank}/policy_seconds"]) for rank in range(3)) for row in rows]
    assert ranks == [2, 2, 2, 3, 3, 1, 1]


def test_a_new_run_begins_its_csv_anew(tmp_path: Path):
    (tmp_path / "progress.csv").write_text("step\n5\n")
    run(tmp_path, range(1, 2))
    assert [row["step"] for row in read_csv(tmp_path)] == ["100"]


def test_a_run_that_was_killed_before_its_first_checkpoint_shows_each_step_once(tmp_path: Path):
    run(tmp_path, range(1, 5))
    make_events_older(tmp_path)
    run(tmp_path, range(1, 3))
    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in log.Scalars("seconds")] == [100, 200]
    assert [row["step"] for row in read_csv(tmp_path)] == ["100", "200"]


def test_lines_are_about_twenty(tmp_path: Path):
    written = io.StringIO()
    lines = Lines(Console(file=written, width=40), total_steps=1000)
    waiting = WaitingTimes(2)
    for update in range(1, 101):
        status = status_at(update)
        lines.update(Status(10 * update, 2.0, update, status.window, status.reports), 50.0, waiting)
    said = written.getvalue().splitlines()
    assert len(said) == 20
    assert said[0] == (
        "step        10 of 1,000  return      -  policy loss 0.5  value loss nan  KL nan  entropy nan  50 steps/s  "
        "env - policy - learn - comm -  sent 1 MB/update  ETA 20 s"
    )
    assert said[10].startswith("step       510 of 1,000  return  510.0")


def test_a_line_says_how_learning_goes_and_where_time_goes():
    written = io.StringIO()
    status = status_at(4)
    waiting = WaitingTimes(2)
    waiting.add([report.times for report in status.reports])
    figures = {"policy_loss": -0.000123456, "value_loss": 12345.678, "approx_kl": 0.0123456, "entropy": 0.69}
    metrics = {f"learning/{name}": value for name, value in figures.items()}
    reports = [replace(report, metrics=metrics) for report in status.reports]
    status = Status(9_876_543, 2.0, 4, status.window, reports)
    Lines(Console(file=written, width=40), total_steps=10_000_000).update(status, 123_456.7, waiting)
    (said,) = written.getvalue().splitlines()
    assert said == (
        "step 9,876,543 of 10,000,000  return   40.0  policy loss -0.00012  value loss 1.2e+04  KL 0.012  "
        "entropy 0.69  123,457 steps/s  env 40% policy 13% learn 7% comm 40%  sent 1 MB/update  ETA 1 s"
    )
    assert len(said) < 200


def rendered(status: Status, waiting: WaitingTimes) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None, record=True)
    dashboard = Dashboard(console, title="CartPole-v1", total_steps=1000)
    console.print(dashboard.render(status, 50.0, waiting))
    return console.export_text()


def test_the_dashboard_shows_what_matters():
    waiting = WaitingTimes(2)
    status = status_at(4)
    waiting.add([report.times for report in status.reports])
    said = rendered(status, waiting)
    for figure in ("400", "40.0  (40.0 to 40.0)", "learning rate", "0.25", "1 MB"):
        assert figure in said
    lines = [line.split() for line in said.splitlines()]
    assert ["0", "26.7%", "13.3%", "6.7%", "53.3%", "0.0%", "26.7%", "-", "-"] in lines
    assert ["1", "53.3%", "13.3%", "6.7%", "26.7%", "0.0%", "0.0%", "2", "GB", "50.0%"] in lines
    assert "rank 1 makes the others wait in environment: 1.0 s, 27%" in said


def test_the_dashboard_is_silent_about_gpus_where_there_are_none():
    waiting = WaitingTimes(1)
    status = status_at(4, world_size=1)
    waiting.add([report.times for report in status.reports])
    said = rendered(status, waiting)
    assert "of it waiting" in said
    assert "GPU" not in said
    assert "one rank, which waits for nobody" in said


def test_the_dashboard_shortens_a_long_list_of_ranks():
    waiting = WaitingTimes(20)
    status = status_at(4, world_size=20)
    waiting.add([report.times for report in status.reports])
    assert "and 4 more" in rendered(status, waiting)


def test_the_table_says_what_communication_is():
    waiting = WaitingTimes(2)
    # One of two ranks waits for 4 s of 10: the mean is 2, and with the 1 s that both have it is 3.
    waiting.add([PhaseTimes(2.0, 2.0, 1.0, 5.0), PhaseTimes(6.0, 2.0, 1.0, 1.0)])
    result = TrainResult(1000, 30.0, [], SyncReport(3.0, 1.0, 1e6), stopped_by="SIGTERM")
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(result_table(result, waiting, title="run", new_steps=500, new_seconds=10.0))
    rows = dict(
        [cell.strip() for cell in line.strip("│\n").split("│")]
        for line in console.export_text().splitlines()
        if line.startswith("│")
    )
    assert rows["time in communication"] == "30.0%"
    assert rows["waiting for other ranks"] == "20.0%"
    assert rows["for gradients"] == "10.0%"
    assert rows["gradients sent while backward went on"] == "20.0%"
    assert rows["stopped before its end by"] == "SIGTERM"
    assert rows["steps per second"] == "50"
    assert rows["return"] == "no episode ended"


def test_figures_read_well():
    assert [format_bytes(count) for count in (None, math.nan, 0, 999, 1500, 2.5e6, 7e12)] == \
        ["-", "-", "0 B", "999 B", "1.5 kB", "2.5 MB", "7e+03 GB"]  # fmt: skip
    assert [format_share(*pair) for pair in ((None, 1), (math.nan, 1), (1, 0), (1, 8))] == ["-", "-", "-", "12.5%"]


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = Settings(total_steps=1000, wandb_project="fastsync-test")
    with RunReport(tmp_path, settings, 2, None) as report:
        report.update(status_at(1))
    run = wandb.init.return_value
    (figures,), options = run.log.call_args
    assert figures["learning/policy_loss"] == 0.5
    assert "episodes/return" not in figures  # no episode has ended
    assert options == {"step": 100}
    run.finish.assert_called_once_with()
    RunReport(tmp_path, settings, 2, None, resumed_step=100, resumed_seconds=2.0)
    first, again = (call.kwargs for call in wandb.init.call_args_list)
    assert first == again
    assert (first["project"], first["resume"], first["dir"]) == ("fastsync-test", "allow", str(tmp_path))
    assert first["config"]["total_steps"] == 1000


def test_a_logger_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb_project='p' needs wandb: pip install wandb"):
        RunReport(tmp_path, replace(SETTINGS, wandb_project="p"), 1, None)
