"""Progress: from the first second on, and as lines where there is no terminal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import progress
from benchmarks.harness.progress import Lines, named, progress_bars, watched_rounds
from tests.benchmarks.test_outer import run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still, but for what a test adds to it."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_files_get_lines_that_say_what_runs_and_how_much_is_done(clock: list[float], capfd: pytest.CaptureFixture[str]):
    with progress_bars(shown=True) as bars:
        assert isinstance(bars, Lines)
        for number, _ in enumerate(watched_rounds([range(2), range(2)], bars, "timed", timeout=100)):
            if number == 0:
                assert capfd.readouterr().err == "[0 of 4] timed\n"  # before anything is done
            clock[0] += 10.0 if number == 2 else 0.1
        assert capfd.readouterr().err == "[3 of 4] timed\n[4 of 4] timed\n"
    assert capfd.readouterr() == ("", "")


def test_each_item_is_named_when_it_begins(clock: list[float], capfd: pytest.CaptureFixture[str]):
    with progress_bars(shown=True) as bars:
        for item in named(bars, ["a", "b"], lambda item: f"case {item}"):
            assert capfd.readouterr().err == f"[{'ab'.index(item)} of 2] case {item}\n"
    assert capfd.readouterr().err == "[2 of 2] case b\n"


def test_ranks_that_show_nothing_say_nothing(capfd: pytest.CaptureFixture[str]):
    with progress_bars(shown=False) as bars:
        assert list(watched_rounds([range(3)], bars, "timed", timeout=100)) == [0, 1, 2]
        assert list(named(bars, ["a"], str)) == ["a"]
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert not isinstance(progress_bars(shown=True), Lines)


COMMANDS = {
    "sync --sizes 5k --methods ddp --repetitions 2 --device cpu": ("starting 2 ranks", "[0 of 3] 5k: check"),
    "ddp --models mlp --batch-size 2 --methods ddp --repetitions 2": ("starting 2 ranks", "[0 of 4] mlp: check"),
    "ops --sizes 18KiB --tensors 6 --wires fp16 --repetitions 1": ("[0 of 1] 18KiB in 6 tensors, wire fp16",),
    "scaling --methods ddp --batch-size 2 --steps 2 --repetitions 1 --oversubscribe --report report": (
        "[launch 1 of 2] starting 1 rank",
        "[0 of 2] mlp: check",
        "[launch 2 of 2] starting 2 ranks",
    ),
    "outer_loss --steps 2 --warm-steps 1 --validate-every 2 --batch 1 --methods int8/2 --seeds 0 --starts warm": (
        "[0 of 1] seed 0, warm-up",
        "[0 of 2] seed 0, warm, int8/2",
    ),
}


@pytest.mark.end_to_end
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_says_what_it_does(line: str, tmp_path: Path):
    said = run(main, tmp_path, *line.split()).splitlines()
    assert said[0] == f"{line.split()[0]}: importing PyTorch"
    places = [said.index(each) for each in COMMANDS[line]]
    assert places == sorted(places)
