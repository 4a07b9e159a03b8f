"""The commands as a user types them: the real launchers, a tiny budget."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastsync.cli import main
from fastsync.ppo.__main__ import main as train_main
from fastsync.ppo.evaluate import find_checkpoint
from fastsync.ppo.ppo import Settings
from fastsync.ppo.settings import load_settings
from tests.forked import Command, until
from tests.refused import refused

pytestmark = pytest.mark.end_to_end

FASTSYNC = (sys.executable, "-m", "fastsync.cli")
TINY = ("--env", "CartPole-v1", "--total-steps", "1000", "--num-envs", "4", "--run-name", "tiny")
ROOT = Path(__file__).parents[2]
LIMIT = 150


def test_training_of_a_rank_alone(tmp_path: Path):
    """Under torchrun it is in test_launch_files.py."""
    process = Command(train_main, tmp_path, *TINY)
    assert process.wait(LIMIT) == 0, process.err
    # The title stands over the table, once.
    assert process.out.count("CartPole-v1 on 1 rank, compression none") == 1
    assert process.out.splitlines()[-1] == "written to runs/tiny"
    folder = tmp_path / "runs" / "tiny"
    assert read_steps(folder)[-1] == find_checkpoint(folder, newest=True)[1].step >= 1000


def read_steps(folder: Path) -> list[int]:
    """The steps that progress.csv has rows for."""
    file = folder / "progress.csv"
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [int(row["step"]) for row in csv.DictReader(line for line in lines if line.endswith("\n"))]


def test_a_training_that_is_stopped_saves_goes_on_and_is_played(tmp_path: Path):
    """From a file of settings, which the command line changes; with the command that the launcher says."""
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nnum_envs: 4\ntotal_steps: 1000000000\nrun_name: mine\n")
    folder = tmp_path / "runs" / "mine"
    words = (*FASTSYNC, "train", "--nproc", "2", "--config", "run.yaml", "--seed", "5")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(read_steps(folder)) >= 3 or process.poll() is not None, "three updates", LIMIT)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 143, err
    newest, saved = find_checkpoint(folder, newest=True)
    said = err.strip().splitlines()[-1]
    assert said == (
        f"fastsync train: stopped by SIGTERM. Resume from runs/mine/checkpoints/{newest.name} with: "
        "fastsync train --nproc 2 --config runs/mine/settings.yaml --resume auto"
    )
    # Nothing that was learnt is lost.
    assert read_steps(folder)[-1] == saved.step
    assert load_settings(str(folder / "settings.yaml"), Settings) == saved.settings_as(Settings)

    as_told = said.partition(" with: fastsync ")[2].split()
    resumed = Command(main, tmp_path, *as_told, "--total-steps", str(saved.step + 1))
    assert resumed.wait(LIMIT) == 0, resumed.err
    steps = read_steps(folder)
    assert steps == sorted(set(steps))
    assert steps[-1] == find_checkpoint(folder, newest=True)[1].step > saved.step
    assert steps[-2] == saved.step

    played = Command(main, tmp_path, "eval", "runs/mine", "--episodes", "2", "--newest")
    assert played.wait(LIMIT) == 0, played.err
    assert played.out.startswith(f"CartPole-v1 after {steps[-1]:,} steps, likeliest actions: return ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-minibatches", "3"], "num_minibatches=3 does not divide the 512 rows"),
        (["--env", "NoSuchEnv-v0"], "env='NoSuchEnv-v0' cannot be made"),
        (["--run-name", "taken"], "the run folder runs/taken exists already; choose another run_name"),
        (
            ["--device", "cuda", "--nproc", "2"],
            "device='cuda': torch sees 1 GPU(s) here, and each of 2 rank(s) takes one; start fewer ranks, or set",
        ),
        (["--device", "gpu"], "gpu"),
        (["--resume", "step-1.pt"], "the checkpoint step-1.pt is damaged"),
        (["--resume", "text.pt"], "resume='text.pt' is neither 'auto' nor a checkpoint"),
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
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "step-1.pt").touch()
    (tmp_path / "text.pt").write_text("no checkpoint")
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
    refused(lambda: train_main(["--resume", "nowhere"]), "2", kind=SystemExit)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m fastsync.ppo: resume='nowhere' is neither 'auto' nor a checkpoint")
    assert not trained
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    refused(lambda: train_main(["--device", "cuda"]), "2", kind=SystemExit)
    assert "device='cuda': torch sees 0 GPU(s) here" in capsys.readouterr().err
    # One of them says it for all, and torchrun ends the others.
    monkeypatch.setenv("RANK", "1")
    train_main(["--resume", "nowhere"])
    assert len(trained) == 1
    assert capsys.readouterr().err == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    missing = ("rich", "pyyaml")
    monkeypatch.setattr("fastsync.doctor.metadata.distributions", lambda name: [] if name in missing else [name])
    for words in (["train"], ["launch", "slurm"], ["eval"]):
        refused(lambda: main(words), "training needs pyyaml, rich: pip install", kind=SystemExit)
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "--", "-m", "mine"]) == 0  # which does not train by the extra


def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path):
    process = Command(main, tmp_path, "train", "--nproc", "2", *TINY, "--env", "tests.toy_envs:BrokenOnRanks")
    assert process.wait(LIMIT) == 1
    assert 'raise OSError("as told")' in process.err
    last = process.err.splitlines()[-1]
    assert re.fullmatch(
        r"fastsync train: torchrun saw rank [01] fail first: EnvironmentFailedError: environment \d+ "
        r"\(BrokenOnRanks\) failed in step 1 of episode 0: OSError: as told",
        last,
    )
