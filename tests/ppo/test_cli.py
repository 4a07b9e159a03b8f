"""The commands as a user types them: real processes, the real launchers, a tiny budget."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastsync
from fastsync.cli import main
from fastsync.ppo.evaluate import find_checkpoint
from fastsync.ppo.ppo import Settings
from fastsync.ppo.settings import load_settings
from fastsync.train import main as train_main

pytestmark = pytest.mark.end_to_end

FASTSYNC = (sys.executable, "-m", "fastsync.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fastsync.train")
ALONE = (sys.executable, "-m", "fastsync.train")
TINY = ("--env", "CartPole-v1", "--total-steps", "1000", "--num-envs", "4", "--run-name", "tiny")
ROOT = Path(__file__).parents[2]


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return end(start(folder, *command))


@pytest.mark.parametrize(
    ("command", "ranks"),
    [((*TORCHRUN, "--compression", "fp16"), "2 ranks, compression fp16"), (ALONE, "1 rank, compression none")],
    ids=["torchrun", "alone"],
)
def test_training_from_the_command_line(tmp_path: Path, command: tuple[str, ...], ranks: str):
    process = run(tmp_path, *command, *TINY)
    assert process.returncode == 0, process.stdout + process.stderr
    # The title stands over the table, once: the ranks have compared their weights before, and one of them prints.
    assert process.stdout.count(f"CartPole-v1 on {ranks}") == 1
    assert process.stdout.splitlines()[-1] == "written to runs/tiny"
    folder = tmp_path / "runs" / "tiny"
    assert read_steps(folder)[-1] == find_checkpoint(folder).step >= 1000


def read_steps(folder: Path) -> list[int]:
    """The steps that progress.csv has rows for."""
    file = folder / "progress.csv"
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [int(row["step"]) for row in csv.DictReader(line for line in lines if line.endswith("\n"))]


def wait_for_updates(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    deadline = time.monotonic() + 100
    while len(read_steps(folder)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_training_that_is_stopped_saves_goes_on_and_is_played(tmp_path: Path):
    """From a file of settings, which the command line changes; with the command that the launcher says."""
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nnum_envs: 4\ntotal_steps: 1000000000\nrun_name: mine\n")
    folder = tmp_path / "runs" / "mine"
    process = start(tmp_path, *FASTSYNC, "train", "--nproc", "2", "--config", "run.yaml", "--seed", "5")
    wait_for_updates(process, folder, 3)
    process.send_signal(signal.SIGTERM)
    stopped = end(process)
    assert stopped.returncode == 143, stopped.stderr
    said = stopped.stderr.strip().splitlines()[-1]
    assert said == (
        "fastsync train: stopped by SIGTERM. Resume from the last checkpoint with: "
        "fastsync train --nproc 2 --config runs/mine/settings.yaml --resume auto"
    )
    saved = find_checkpoint(folder)
    # Nothing that was learnt is lost.
    assert read_steps(folder)[-1] == saved.step
    assert load_settings(str(folder / "settings.yaml"), Settings) == saved.settings_as(Settings)

    as_told = said.partition(" with: fastsync ")[2].split()
    resumed = run(tmp_path, *FASTSYNC, *as_told, "--total-steps", str(saved.step + 1))
    assert resumed.returncode == 0, resumed.stderr
    steps = read_steps(folder)
    assert steps == sorted(set(steps))
    assert steps[-1] == find_checkpoint(folder).step > saved.step
    assert steps[-2] == saved.step

    played = run(tmp_path, *FASTSYNC, "eval", "runs/mine", "--episodes", "2")
    assert played.returncode == 0, played.stderr
    assert played.stdout.startswith(f"CartPole-v1 after {steps[-1]:,} steps, likeliest actions: return ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-minibatches", "3"], "num_minibatches=3 does not divide the 1024 rows"),
        (["--nnodes", "2"], "nnodes=2 needs master_addr"),
        (["--env", "NoSuchEnv-v0"], "env='NoSuchEnv-v0' cannot be made"),
        (["--run-name", "taken"], "the run folder runs/taken exists already; choose another run_name"),
        (["--resume", "damaged.pt"], "the checkpoint damaged.pt is damaged"),
    ],
)
def test_bad_arguments_are_refused_before_ranks_are_launched(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "damaged.pt").touch()
    monkeypatch.setattr("fastsync.ppo.cli.launch_ranks", lambda *arguments, **options: pytest.fail("launched"))
    try:
        status: object = main(["train", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    # The message may be wrapped into a frame.
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_a_rank_that_is_started_by_others_refuses_with_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    trained: list[Settings] = []
    monkeypatch.setattr("fastsync.ppo.cli.train_rank", trained.append)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match=r"^2$"):
        train_main(["--resume", "nowhere"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m fastsync.train: resume='nowhere' is neither 'auto' nor a checkpoint")
    assert not trained
    # One of them says it for all, and torchrun ends the others.
    monkeypatch.setenv("RANK", "1")
    train_main(["--resume", "nowhere"])
    assert len(trained) == 1
    assert capsys.readouterr().err == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("rich", "yaml") else find_spec(name))
    for command in ("train", "launch", "eval"):
        with pytest.raises(SystemExit, match=r"^training needs pyyaml, rich: pip install "):
            main([command])


def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path):
    process = run(tmp_path, *FASTSYNC, "train", "--nproc", "2", *TINY, "--env", "tests.toy_envs:BrokenOnRanks")
    assert process.returncode == 1
    assert 'raise OSError("as told")' in process.stderr
    last = process.stderr.splitlines()[-1]
    assert re.fullmatch(r"fastsync train: rank [01] failed first: OSError: as told", last)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fastsync {fastsync.__version__}\n"
