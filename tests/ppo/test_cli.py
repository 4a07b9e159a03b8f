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
    [
        pytest.param((*TORCHRUN, "--compression", "fp16"), "2 ranks, compression fp16", id="torchrun-fp16"),
        pytest.param(ALONE, "1 rank, compression none", id="alone"),
    ],
)
def test_training_from_the_command_line(tmp_path: Path, command: tuple[str, ...], ranks: str):
    process = run(tmp_path, *command, *TINY)
    check_what_a_training_says(process, f"CartPole-v1 on {ranks}", "tiny")
    folder = tmp_path / "runs" / "tiny"
    assert find_checkpoint(folder).step >= 1000
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert read_steps(folder)[-1] == find_checkpoint(folder).step


def check_what_a_training_says(process: subprocess.CompletedProcess[str], title: str, run_name: str) -> None:
    assert process.returncode == 0, process.stdout + process.stderr
    # The title stands over the table, once: the ranks have compared their weights before, and one of them prints.
    assert process.stdout.count(title) == 1
    for row in ("return", "steps per second", "time in communication", "bytes on the wire"):
        assert row in process.stdout
    assert process.stdout.splitlines()[-1] == f"written to runs/{run_name}"


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
        "fastsync train: stopped by SIGTERM. Go on from the last checkpoint with: "
        "fastsync train --nproc 2 --config runs/mine/settings.yaml --resume auto"
    )
    assert "stopped before its end by" in stopped.stdout
    saved = find_checkpoint(folder)
    # Nothing that was learnt is lost.
    assert read_steps(folder)[-1] == saved.step
    assert load_settings(str(folder / "settings.yaml"), Settings) == saved.settings_as(Settings)

    as_told = said.partition(" with: fastsync ")[2].split()
    resumed = run(tmp_path, *FASTSYNC, *as_told, "--total-steps", str(saved.step + 1))
    check_what_a_training_says(resumed, "CartPole-v1 on 2 ranks, compression none", "mine")
    steps = read_steps(folder)
    assert steps == sorted(set(steps))
    assert steps[-1] == find_checkpoint(folder).step > saved.step
    assert steps[-2] == saved.step

    played = run(tmp_path, *FASTSYNC, "eval", "runs/mine", "--episodes", "2")
    assert played.returncode == 0, played.stderr
    assert played.stdout.startswith(f"CartPole-v1 after {steps[-1]:,} steps, likeliest actions: return ")


def test_a_training_that_loses_a_rank_comes_back(tmp_path: Path):
    options = ("--total-steps", "15000", "--num-envs", "4", "--num-epochs", "2", "--checkpoint-interval", "0")
    process = start(tmp_path, *FASTSYNC, "train", "--nproc", "2", "--max-restarts", "1", *options, "--run-name", "lost")
    folder = tmp_path / "runs" / "lost"
    wait_for_updates(process, folder, 5)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    finished = end(process)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "going on from step" in finished.stdout
    steps = read_steps(folder)
    assert steps == sorted(set(steps))
    assert steps[-1] == find_checkpoint(folder).step >= 15000


def ranks_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher has started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-minibatches", "3"], "num_minibatches=3 does not divide the 1024 rows"),
        (["--nproc", "0"], "nproc=0 must be at least 1"),
        (["--nnodes", "2"], "nnodes=2 needs master_addr"),
        (["--nnodes", "2", "--node-rank", "2"], "node_rank=2 must be less than nnodes=2"),
        (["--config", "smoke-signals"], "config='smoke-signals' is neither a file nor a preset"),
        (["--env", "NoSuchEnv-v0"], "env='NoSuchEnv-v0' cannot be made"),
        (["--run-name", "taken"], "the run folder runs/taken exists already; choose another run_name"),
        (["--resume", "nowhere"], "resume='nowhere' is neither 'auto' nor a checkpoint"),
        (["--resume", "damaged.pt"], "the checkpoint damaged.pt is damaged"),
    ],
)  # fmt: skip
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
    said = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "NoSuchEnv-v0"], "env='NoSuchEnv-v0' cannot be made"),
        (["--resume", "nowhere"], "resume='nowhere' is neither 'auto' nor a checkpoint"),
    ],
)
def test_a_rank_that_is_started_by_others_refuses_with_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    trained: list[Settings] = []
    monkeypatch.setattr("fastsync.ppo.cli.train_rank", trained.append)
    for rank in (None, "0"):
        if rank:
            monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match=r"^2$"):
            train_main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m fastsync.train: ")
        assert message in line
    assert not trained
    # One of them says it for all, and torchrun ends the others.
    monkeypatch.setenv("RANK", "1")
    train_main(arguments)
    assert len(trained) == 1
    assert capsys.readouterr().err == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("rich", "yaml") else find_spec(name))
    for command in ("train", "launch", "eval"):
        with pytest.raises(SystemExit, match=r"^training needs pyyaml, rich: pip install "):
            main([command])
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "--wandb-project", "mine"]) == 2
    assert "wandb_project='mine' needs wandb: pip install wandb" in capsys.readouterr().err


BROKEN = """\
import os

import gymnasium


class Broken(gymnasium.Wrapper):
    def step(self, action):
        if "RANK" in os.environ:
            raise OSError("as told")
        return super().step(action)


def make():
    return Broken(gymnasium.make("CartPole-v1"))
"""


def test_a_rank_that_fails_is_told(tmp_path: Path):
    (tmp_path / "broken.py").write_text(BROKEN)
    process = run(tmp_path, *FASTSYNC, "train", "--nproc", "2", *TINY, "--env", "broken:make")
    assert process.returncode == 1
    # The other rank may have said before that it misses this one.
    *_, where, raising, said = (line for line in process.stderr.splitlines() if "^" not in line)
    assert where == f'  File "{tmp_path}/broken.py", line 9, in step'
    assert raising == '    raise OSError("as told")'
    assert re.fullmatch(r"fastsync train: rank [01] failed first: OSError: as told", said)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fastsync {fastsync.__version__}\n"


@pytest.mark.parametrize("words", [[], ["smoke"], ["--smoke", "train"], ["doctor", "--smoke"]])
def test_what_is_no_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    assert "usage: fastsync" in capsys.readouterr().err
