"""The commands as a user types them: real processes, the real launchers, a tiny budget."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastsync.cli import main
from fastsync.ppo.checkpoint import load_checkpoint

FASTSYNC = (sys.executable, "-m", "fastsync.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fastsync.train")
TINY = ("--env", "CartPole-v1", "--total-steps", "1000", "--num-envs", "4", "--run-name", "tiny")
ROOT = Path(__file__).parent.parent


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        pytest.param((*FASTSYNC, "train", "--nproc", "2", "--sync", "cat"), "2 ranks, sync cat", id="launcher-cat"),
        pytest.param((*TORCHRUN, "--sync", "ddp"), "2 ranks, sync ddp", id="torchrun-ddp"),
        pytest.param((*FASTSYNC, "train", "--nproc", "2"), "2 ranks, sync fastsync", id="launcher-fastsync"),
        pytest.param((sys.executable, "-m", "fastsync.train", "--sync", "ddp"), "1 rank, sync ddp", id="alone-ddp"),
    ],
)
def test_training_from_the_command_line(tmp_path: Path, command: tuple[str, ...], ranks: str):
    process = run(tmp_path, *command, *TINY)
    assert process.returncode == 0, process.stdout + process.stderr
    # The title stands over the table, once: the ranks have compared their weights before, and one of them prints.
    assert process.stdout.count(f"CartPole-v1 on {ranks}") == 1
    for row in ("return", "steps per second", "time in synchronisation", "bytes on the wire"):
        assert row in process.stdout
    folder = tmp_path / "runs" / "tiny"
    assert load_checkpoint(folder / "checkpoint.pt").step >= 1000
    assert (folder / "learning_curve.png").exists()
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-minibatches", "3"], "num_minibatches=3 does not divide the 1024 rows"),
        (["--compression", "fp16", "--sync", "ddp"], "compression='fp16' needs sync='fastsync'"),
        (["--nproc", "0"], "nproc=0 must be at least 1"),
        (["--sync", "smoke-signals"], "smoke-signals"),
        (["--env", "NoSuchEnv-v0"], "env='NoSuchEnv-v0' cannot be made"),
        (["--env", "Pendulum-v1"], "only Discrete spaces that start at 0 are supported"),
    ],
)
def test_bad_arguments_are_refused_before_ranks_are_launched(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
):
    try:
        status: object = main(["train", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    # The message may be wrapped into a frame.
    said = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert message in said


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("rich", "tyro") else object())
    with pytest.raises(SystemExit, match=r"^training needs rich, tyro, .*: pip install 'fastsync\[train\]'$"):
        main(["train"])


def test_a_rank_that_fails_is_told(tmp_path: Path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    process = run(tmp_path, *FASTSYNC, "train", "--nproc", "2", "--sync", "cat", *TINY)
    assert process.returncode == 1
    assert "fastsync train: rank 0 failed first: ValueError: the run folder runs/tiny exists already" in process.stderr


def test_help_names_the_subcommands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    said = capsys.readouterr().out
    assert "train" in said
    assert "doctor" in said
