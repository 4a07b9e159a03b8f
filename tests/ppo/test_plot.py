"""Learning curves: which runs are one curve, its mean and spread, the picture, and what is refused."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsync.cli import main
from fastsync.ppo.plot import grouped, mean_curve
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.folder import CHECKPOINTS
from fastsync.ppo.settings import dump_settings

pytest.importorskip("matplotlib")


def make_run(folder: Path, slope: float, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / CHECKPOINTS).mkdir()
    settings = replace(Settings(run_name=folder.name), **changes)
    (folder / "settings.yaml").write_text(dump_settings(settings))
    lines = ["step,seconds,episodes/return,evaluation/return", "0,0,,"]
    lines += [f"{step},{step / 10},{slope * step},{step if step == 300 else ''}" for step in range(100, 501, 100)]
    (folder / "progress.csv").write_text("\n".join(lines) + "\n600,6")  # it is being written
    return folder


def test_runs_that_differ_in_their_seeds_are_one_curve(tmp_path: Path):
    runs = [make_run(tmp_path / f"{seed}", slope, seed=seed) for seed, slope in ((1, 1.0), (2, 3.0))]
    other = make_run(tmp_path / "int8", 2.0, compression="int8+ef")
    curves = grouped([*runs, other], "step", "episodes/return")
    assert {label: len(rows) for label, rows in curves.items()} == {
        "CartPole-v1, compression none": 2, "CartPole-v1, compression int8+ef": 1
    }  # fmt: skip
    grid, mean, least, most = mean_curve(curves["CartPole-v1, compression none"])
    assert (grid[0], grid[-1]) == (100, 500)
    np.testing.assert_allclose((mean, least, most), (2 * grid, grid, 3 * grid))


def test_runs_of_other_numbers_of_ranks_are_other_curves(tmp_path: Path):
    alone, *pair = (make_run(tmp_path / f"{seed}", 1.0, seed=seed) for seed in range(3))
    for run, num_ranks in ((alone, 1), *((each, 2) for each in pair)):
        (header, *rows) = (run / "progress.csv").read_text().splitlines()[:-1]
        names = [f"rank{rank}/environment_seconds" for rank in range(num_ranks)]
        lines = [",".join([header, *names]), *(",".join([row, *["1.0"] * num_ranks]) for row in rows)]
        (run / "progress.csv").write_text("\n".join([*lines, ""]))
    curves = grouped([alone, *pair], "step", "episodes/return")
    assert {label: len(rows) for label, rows in curves.items()} == {
        "CartPole-v1, ranks 1": 1, "CartPole-v1, ranks 2": 2
    }  # fmt: skip


@pytest.mark.parametrize("words", [[], ["--x", "seconds"], ["--metric", "evaluation/return"]])
def test_a_picture_of_several_runs_is_written_and_named(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    runs = [str(make_run(tmp_path / "runs" / f"{seed}", seed, seed=seed)) for seed in (1, 2)]
    assert main(["plot", *runs, *words]) == 0
    assert capsys.readouterr().out == "picture: returns.png\n"
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_the_newest_run_is_drawn_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["plot"]) == 2
    assert "say which runs to draw; the folder 'runs' has none here" in capsys.readouterr().err
    make_run(Path("runs") / "mine", 1.0)
    assert main(["plot"]) == 0
    assert capsys.readouterr().out == "picture: runs/mine/returns.png\n"


def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs") / "mine", 1.0)
    (tmp_path / "runs/mine/checkpoints").rmdir()
    empty = make_run(Path("runs") / "empty", 1.0)
    (empty / "progress.csv").write_text("step,episodes/return\n1,\n")
    begun = make_run(Path("runs") / "begun", 1.0)
    (begun / "progress.csv").unlink()
    for words, message in (
        (["runs"], "run='runs' is not the folder of a run; the newest here:\n  fastsync plot runs/"),
        (
            ["runs/mine", "--metric", "x"],
            "metric='x' is not in runs/mine/progress.csv; it has step, seconds, episodes/",
        ),
        (["runs/empty"], "runs/empty/progress.csv has no values of episodes/return: no episode may have ended yet"),
        (["runs/begun"], "run='runs/begun' has no progress.csv yet"),
        (["runs/mine", "--output", "no/such/x.png"], "output='no/such/x.png' cannot be written: No such file"),
        (["runs/mine", "--output", "x.html"], "output='x.html' cannot be written: Format 'html' is not supported"),
    ):
        assert main(["plot", *words]) == 2
        assert message in capsys.readouterr().err

    imported = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["plot", "runs/mine"]) == 2
    assert "a picture needs matplotlib: pip install " in capsys.readouterr().err
