"""The live panel: what it shows in wide, narrow and low terminals, and how it leaves them."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fastsync.ppo.runs import panel as panel_module
from fastsync.ppo.runs.console import RunConsole
from fastsync.ppo.runs.metrics import TrainResult
from fastsync.ppo.runs.panel import Curve, RunPanel
from fastsync.ppo.runs.rank_output import output_kept_apart
from fastsync.ppo.runs.usage import Usage, UsageMeter
from tests.ppo.test_runs_report import scalars_at

TITLE = "CartPole-v1 on 2 ranks, compression none"


def shown(width: int, height: int, num_ranks: int = 2, **own: float) -> list[str]:
    """The lines of a panel, after an update with these metrics."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    panel = RunPanel(terminal, TITLE, 1000, num_ranks)
    scalars = scalars_at(4, num_ranks) | {"learning/explained_variance": 0.5} | own
    panel.update(250, scalars, scalars, ["31.0 ± 0.0 at step 200", "the best"])
    panel.stop()
    plain = Console(file=io.StringIO(), width=width, height=height)
    plain.print(panel)
    assert isinstance(plain.file, io.StringIO)
    return [line.rstrip() for line in plain.file.getvalue().splitlines()]


def test_80_columns_have_all_of_it():
    lines = shown(80, 24, **{"rank0/cores": 0.97, "rank1/cores": 0.5, "rank0/gpu": 0.25})
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"── {TITLE} ──")
    for part in (
        " 25%  8 s, 15 s left", "step 250 of 1,000", "50 steps/s", "sent 1 MB/update", "return 40.0 ± 0.0",
        "40.0 to 40.0", "evaluation 31.0 ± 0.0 at step 200  the best", "explained var.       0.5",
        "KL                     -",
    ):  # fmt: skip
        assert part in text
    head, first, second, end = lines[-4:]
    assert head.split() == ["rank", "env", "policy", "learn", "comm", "report", "eval", "cores", "GPU"]
    assert first.split()[:9] == ["0", "27%", "13%", "7%", "53%", "0%", "0%", "0.97", "25%"]
    assert second.split()[7:9] == ["0.50", "-"]
    assert end == ""


@pytest.mark.parametrize("num_ranks", [1, 2, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (46, 14), (20, 8), (5, 3), (200, 60)])
def test_it_fits_into_any_terminal(width: int, height: int, num_ranks: int):
    lines = shown(width, height, num_ranks)
    assert max(map(len, lines)) <= width
    assert len(lines) < height or height < 4
    if (num_ranks, height) == (64, 24):
        assert lines[-2].startswith("and 49 more ranks")


def test_it_is_drawn_a_few_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(panel_module.time, "monotonic", lambda: now)
    panel = RunPanel(Console(file=io.StringIO(), force_terminal=True), TITLE, 1000, 2)
    drawn = list[float]()
    monkeypatch.setattr(panel._live, "refresh", lambda: drawn.append(now))
    for _ in range(100):
        now += 0.01
        panel.update(1, scalars_at(1), scalars_at(1), [])
    monkeypatch.undo()
    panel.stop()
    assert len(drawn) <= 3


def test_a_curve_keeps_the_whole_run_in_a_few_points():
    curve = Curve()
    assert curve.text() == ""
    for value in [math.nan, *range(1000)]:
        curve.add(float(value))
    assert curve.text()[0] == "▁"
    assert curve.text()[-1] == "█"
    assert 16 <= len(curve.text()) < Curve.MOST
    assert list(curve.text()) == sorted(curve.text())
    flat = Curve()
    for value in (1.0, math.inf, 1.0):
        flat.add(value)
    assert len(flat.text()) == 3


@contextmanager
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Makes a terminal of standard output and error. Yields a function that returns what was written since its last
    call.
    """
    other, own = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    os.set_blocking(other, False)

    def written() -> str:
        stream.flush()
        parts = list[bytes]()
        with suppress(BlockingIOError):  # nothing is left
            while True:
                parts.append(os.read(other, 4096))
        return b"".join(parts).decode()

    with os.fdopen(own, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        yield written
    os.close(other)


def test_what_python_prints_appears_above_it_and_an_error_leaves_a_line(monkeypatch: pytest.MonkeyPatch):
    with a_terminal(monkeypatch) as terminal:
        console = RunConsole(TITLE, 1000, 0, 2)
        scalars = scalars_at(4)
        console.update(250, scalars)
        print("printed")
        print("as gymnasium warns", file=sys.stderr)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal()).replace("\r", "")
        assert text.index("printed\n") < text.index("as gymnasium warns\n") < text.rindex(f"── {TITLE}")
        console.close()
        raw = terminal()
        left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "").split("\n")[-4:]
        assert left[0].startswith("step   250 of 1,000  return   40.0")
        assert left[-1] == ""
        assert "\x1b[?25" not in raw  # a rank that is killed could not show the cursor again
        print("later")
        assert terminal() == "later\r\n"


def test_a_quiet_console_prints_warnings_only(monkeypatch: pytest.MonkeyPatch):
    with a_terminal(monkeypatch) as terminal:
        console = RunConsole(TITLE, 1000, 0, 2, quiet=True)
        console.say("a note")
        console.update(250, scalars_at(4))
        console.evaluated(250, scalars_at(4) | {"evaluation/return": 1.0, "evaluation/return_std": 0.0}, 1.0)
        sync: Any = None
        console.finish(TrainResult(1000, 30.0, [], sync), 50.0)
        console.close()
        console.warn("a warning")
        assert terminal() == "a warning\r\n"


def test_other_ranks_write_into_a_file_while_they_share_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with a_terminal(monkeypatch) as terminal:
        with output_kept_apart(tmp_path / "rank1.log"):
            assert not (tmp_path / "rank1.log").exists()
            print("of rank 1")
            print("and an error", file=sys.stderr)
        with output_kept_apart(tmp_path / "gone" / "rank1.log"):
            print("seen")
        assert (tmp_path / "rank1.log").read_text() == "of rank 1\nand an error\n"
        assert terminal() == "seen\r\n"


def test_usage_is_measured_now_and_then(monkeypatch: pytest.MonkeyPatch):
    meter = UsageMeter(torch.device("cpu"))
    assert all(map(math.isnan, vars_of(meter.read())))
    monkeypatch.setattr("fastsync.ppo.runs.usage.INTERVAL", 0.0)
    sum(range(10**5))
    usage = meter.read()
    assert 0 < usage.cores < 1000
    assert 1e7 < usage.memory < 1e12
    assert math.isnan(usage.gpu)
    assert math.isnan(usage.gpu_memory)
    # Where there is a GPU without NVML, nothing fails.
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1 / 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    meter = UsageMeter(torch.device("cuda"))
    assert (meter.read().gpu_memory, math.isnan(meter.read().gpu)) == (5.0, True)


def vars_of(usage: Usage) -> tuple[float, ...]:
    return usage.cores, usage.memory, usage.gpu, usage.gpu_memory
