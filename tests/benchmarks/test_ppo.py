"""``python -m benchmarks ppo``: made-up trainings, tiny real ones, and what ends them; no assertion about speed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.baselines.trainers import TRAINERS, _meeting, run_alone
from benchmarks.baselines.training import Outcome, Training
from benchmarks.commands.ppo import OTHERS
from benchmarks.harness.records import Record, RowFile
from fastsync.ppo.ppo import PPO
from tests.forked import state_of, until


def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


pytestmark = pytest.mark.end_to_end


def test_ppo_compares_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """With trainings that are made up: 1000 steps/s a rank, SB3 half of that, and CleanRL learns nothing.

    Two trainings that do not communicate have 1250 steps/s each.
    """

    def made_up(trainer: str, training: Training, *, timeout: float) -> Outcome:
        ours = {"fastsync": 1000.0 * training.nproc, "fastsync apart": 2500.0, "fastsync in step": 2000 / 0.9}
        speed = {**ours, "stable-baselines3": 500.0}.get(trainer, 250.0)
        returned = {"environment alone": None, "cleanrl loop": 22.0}.get(trainer, 100.0 + training.seed)
        return Outcome(training.total_steps, training.total_steps / speed, returned)

    monkeypatch.setattr("benchmarks.commands.ppo.run_alone", made_up)
    all_installed(monkeypatch)
    status = main(["ppo", "--hyperparameters", "zoo", "--json", str(tmp_path / "rows.json")])
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert status == 1
    assert "WRONG: CleanRL's loop at" in capsys.readouterr().out
    assert list(rows) == [
        "environment alone",
        "stable-baselines3",
        "CleanRL's loop",
        "fastsync, 1 rank",
        "fastsync, 1 rank, SyncVectorEnv",
        "fastsync, 2 ranks, same batch",
        "fastsync, 2 ranks, 2 × the batch",
        "fastsync, 2 × 1 rank, no communication",
        "fastsync, 2 × 1 rank, in step",
    ]
    figures = rows["fastsync, 2 ranks, same batch"]["figures"]
    assert (figures["steps_per_second"], figures["steps_per_second_per_rank"]) == (2000, 1000)
    assert [figures[f"over_{baseline}"] for baseline in ("stable-baselines3", "CleanRL's loop")] == [4, 8]
    assert figures["mean_return"] == 102  # of the seeds 1, 2 and 3
    wide = rows["fastsync, 2 ranks, 2 × the batch"]
    assert wide["settings"]["num_envs"] == 2 * rows["fastsync, 1 rank"]["settings"]["num_envs"]
    ratios = [wide["figures"][name] for name in ("weak_scaling", "over_apart", "over_in_step")]
    assert ratios == pytest.approx([1, 0.8, 0.9])


def test_ppo_keeps_what_was_measured_whatever_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained = []

    def made_up(trainer: str, training: Training, *, timeout: float) -> Outcome:
        trained.append(trainer)
        if len(trained) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return Outcome(training.total_steps, 1.0, 100.0)

    monkeypatch.setattr("benchmarks.commands.ppo.run_alone", made_up)
    rows = RowFile(tmp_path / "rows.json")
    rows.add([Record("ppo", "of an earlier run", {}, {}, True, [1.0], {})])
    assert main(["ppo", "--hyperparameters", "zoo", "--repetitions", "1", "--json", str(rows.path)]) == 143
    assert [record.method for record in rows.read()] == ["environment alone", "stable-baselines3"]
    assert "rows measured before are shown" in capsys.readouterr().out


def test_a_training_that_hangs_ends_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/rank\nwait\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(launcher))
    training = Training(total_steps=1, num_envs=1, num_steps=1, num_minibatches=1, num_epochs=1, seed=1)
    with pytest.raises(RuntimeError, match="fastsync has not ended within 2 s"):
        run_alone("fastsync", training, timeout=2)
    rank = int((tmp_path / "rank").read_text())
    until(lambda: not state_of(rank), "the end of the launcher's rank")


@pytest.mark.parametrize("trainer", ["fastsync", "environment alone", "stable-baselines3"])
def test_trainings_of_other_environments_run(trainer: str):
    pytest.importorskip("mujoco")
    few = {"total_steps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 1, "num_epochs": 1}
    outcome = TRAINERS[trainer](replace(OTHERS["HalfCheetah-v5"], **few))
    assert (outcome.steps, outcome.mean_return) == (64, None)  # no episode is as short


def assert_trains(train: Callable[[Training], Outcome]) -> None:
    training = Training(total_steps=512, num_envs=4, num_steps=32, num_minibatches=2, num_epochs=1, seed=1, nproc=2)
    outcome = train(training)
    assert 512 <= outcome.steps < 768
    assert outcome.seconds > 0
    assert outcome.mean_return is not None
    assert 9 < outcome.mean_return < 200


OTHERS_NEED = {"sbx", "rlox", "rejax"}  # in environments of their own, see test_until.py


@pytest.mark.sampled(2)
@pytest.mark.parametrize("trainer", sorted(TRAINERS.keys() - OTHERS_NEED - {"environment alone"}))
def test_trainings_run(trainer: str):
    assert_trains(TRAINERS[trainer])


@pytest.mark.parametrize("method", ["learn", "_take_step"])
def test_ranks_in_step_go_on_once_all_have_come(method: str):
    counts, came = np.zeros(2), list[list[float]]()

    def other_rank() -> None:
        while counts[0] < 1:
            pass
        counts[1] = 1

    with mock.patch.object(PPO, method, side_effect=lambda _: came.append(counts.tolist())), _meeting(counts, 0):
        threading.Thread(target=other_rank, daemon=True).start()
        getattr(PPO, method)(None)
    assert came == [[1, 1]]
    assert counts.tolist() == [np.inf, 1]


def test_a_training_runs_in_a_process_of_its_own():
    assert_trains(partial(run_alone, "cleanrl loop", timeout=150))
