"""What a run leaves behind and says: logs that go on after a resumption, lines, the table."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.console import RunConsole
from fastsync.ppo.runs.figures import format_return
from fastsync.ppo.runs.loggers import CsvLog, open_loggers
from fastsync.ppo.runs.metrics import PhaseTimes, RankReport, TrainResult, ended_episodes, scalars_of

SETTINGS = Settings(total_steps=1000)


def scalars_at(update: int, world_size: int = 2, first_episode: int = 3, **own: float) -> dict[str, float]:
    """After so many updates of 100 steps and 2 seconds, the last rank being slow; from some update on episodes end."""
    reports = [
        RankReport(
            PhaseTimes(1.0 + rank, 0.5, 0.25, 2.0 - rank),
            wire_bytes=1e6,
            episodes=[Episode(0, 10.0 * update, 5)] if update >= first_episode else [],
            metrics={"learning/policy_loss": float(rank), "learning/learning_rate": 1.0 / update} | own,
        )
        for rank in range(world_size)
    ]
    return scalars_of(update, 2.0 * update, 50.0, ended_episodes(reports), reports)


def run(folder: Path, updates: range, *, world_size: int = 2, resumed_update: int = 0) -> None:
    loggers = open_loggers(folder, SETTINGS, 100 * resumed_update)
    for update in updates:
        for logger in loggers:
            logger.log(100 * update, scalars_at(update, world_size))
    for logger in loggers:
        logger.close()


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def make_events_older(folder: Path) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second that they were made in."""
    (file,) = folder.glob("events.out.tfevents.*")
    file.rename(folder / "events.out.tfevents.0000000001.host.1.0")


def test_logs_hold_each_update(tmp_path: Path):
    run(tmp_path, range(1, 11))
    rows = read_csv(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(100, 1001, 100))
    first, last = rows[0], rows[-1]
    assert first["episodes/return"] == ""
    assert (last["episodes/return"], last["episodes/length"], last["update"]) == ("100.0", "5.0", "10")
    assert (last["learning/policy_loss"], last["learning/learning_rate"]) == ("0.5", "0.1")
    assert (last["rank0/environment_seconds"], last["rank1/environment_seconds"]) == ("1.0", "2.0")
    assert (last["rank0/waiting_seconds"], last["rank1/waiting_seconds"]) == ("1.0", "0.0")
    assert last["speed/steps_per_second"] == "50.0"

    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in log.Scalars("episodes/return")] == list(range(300, 1001, 100))
    assert log.Scalars("rank0/waiting_seconds")[-1].value == 1.0


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path):
    run(tmp_path, range(1, 9))
    make_events_older(tmp_path)
    whole = read_csv(tmp_path)
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("900,18.0,9")  # killed while writing

    run(tmp_path, range(6, 11), resumed_update=5)
    rows = read_csv(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(100, 1001, 100))
    assert rows[:8] == whole
    assert not list(tmp_path.glob("*.tmp"))
    log = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in log.Scalars("seconds")] == list(range(100, 1001, 100))


def test_a_metric_that_comes_late_gets_a_column(tmp_path: Path):
    """Where a run begins, or goes on, with a rollout that only resets environments, a loss has not told its own."""
    for resumed_step, steps in ((0, (10, 20, 30)), (20, (20, 30, 40))):
        log = CsvLog(tmp_path / "progress.csv", resumed_step)
        for step in steps:
            own = {"learning/own": float(step)} if step > 10 else {}
            log.log(step, {"update": step / 10} | own | ({"info/late": 1.0} if step == 40 else {}))
        log.close()
    rows = read_csv(tmp_path)
    assert [row["step"] for row in rows] == ["10", "20", "20", "30", "40"]
    assert [row["learning/own"] for row in rows] == ["", "20.0", "20.0", "30.0", "40.0"]
    assert [row["info/late"] for row in rows] == ["", "", "", "", "1.0"]
    assert list(rows[0]) == ["step", "update", "learning/own", "info/late"]


def table_of(console: RunConsole, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    sync: Any = SimpleNamespace(exposed_time=3.0, wire_bytes=1e6)
    console.finish(TrainResult(1000, 30.0, [], sync, stopped_by="SIGTERM"), 50.0)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for _, name, value, _ in rows}


def shares_in(table: dict[str, str], *prefixes: str) -> float:
    return sum(float(value.rstrip("%")) for name, value in table.items() if name.startswith(prefixes))


def test_the_table_says_what_communication_is_and_adds_up(capsys: pytest.CaptureFixture[str]):
    console = RunConsole("title", 1000, 2000, 2)  # of which no line is due
    # One of two ranks waits for 4 s of 10: the mean is 2, and with the 1 s that both have it is 3.
    times = PhaseTimes(2.0, 2.0, 1.0, 5.0), PhaseTimes(6.0, 2.0, 1.0, 1.0)
    reports = [RankReport(each, gradients_seconds=gradients) for each, gradients in zip(times, (3.0, 0.5), strict=True)]
    console.update(100, scalars_of(1, 2.0, 50.0, [], reports))
    table = table_of(console, capsys)
    assert table["time in communication"] == "30.0%"
    assert (table["for gradients or weights"], table["for everything else"]) == ("17.5%", "12.5%")
    assert shares_in(table, "time in") == pytest.approx(100.0)
    assert (table["slowest rank"], table["communication that waited for it"]) == ("1", "20.0%")
    assert table["stopped early by"] == "SIGTERM"


def test_one_rank_has_no_communication(capsys: pytest.CaptureFixture[str]):
    console = RunConsole("title", 1000, 0, 1)
    console.update(100, scalars_of(1, 2.0, 50.0, [], [RankReport(PhaseTimes(2.0, 3.0, 4.0, 0.0, 1.0))]))
    line = capsys.readouterr().out
    assert "env 20% policy 30% learn 40%" in line
    assert not re.search("comm|sent", line)
    table = table_of(console, capsys)
    assert shares_in(table, "time in") == pytest.approx(100.0)
    assert not [name for name in table if "rank" in name or "communication" in name or "wire" in name]


@pytest.mark.parametrize("width", [80, 60, 120])
def test_lines_of_progress_fit_into_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
):
    monkeypatch.setenv("COLUMNS", str(width))
    console = RunConsole("title", 10_000_000, 0, 8)
    own = {f"learning/my_metric_{number}": -1.234e-05 for number in range(5)}
    console.update(9_999_999, scalars_at(1, 8) | {"speed/steps_per_second": 1_234_567.0} | own)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("step  9,999,999 of 10,000,000  return      -")
    assert "1,234,567 steps/s" in " ".join(lines)
    assert "sent 1 MB/update" in " ".join(lines)
    if width >= 80:
        assert all(line.startswith("  ") for line in lines[1:])
    assert "  ".join(lines).count("my_metric_") == 5


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = MagicMock()
    wandb.init.return_value.step = 0
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = Settings(total_steps=1000, wandb_project="fastsync-test")
    for logger in open_loggers(tmp_path, settings, 0):
        logger.log(100, scalars_at(1))
        logger.close()
    (figures,), options = wandb.init.return_value.log.call_args
    assert (figures["learning/policy_loss"], options) == (0.5, {"step": 100})
    assert "episodes/return" not in figures  # no episode has ended
    wandb.init.return_value.step = 101  # as wandb has it in a run that goes on
    open_loggers(tmp_path, settings, 100)[-1].log(100, {"evaluation/return": 1.0})  # of a last evaluation, made up
    assert wandb.init.return_value.log.call_args.kwargs == {"step": 101}
    first, again = (call.kwargs for call in wandb.init.call_args_list)
    assert first == again
    assert (first["project"], first["resume"], first["dir"]) == ("fastsync-test", "allow", str(tmp_path))


def test_small_returns_keep_their_digits():
    values = (-0.6123, -0.4987, 0.00123, 0.0, -3.14159, 21.25, 499.96, float("nan"))
    assert [*map(format_return, values)] == ["-0.612", "-0.499", "0.00123", "0.0", "-3.14", "21.2", "500.0", "nan"]
    assert [format_return(value, 2) for value in (31.0, 0.0, 0.125)] == ["31.00", "0.00", "0.125"]
