"""What people type: names of other trainers, options that belong elsewhere, files that are no checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsync.cli import main
from fastsync.ppo import Policy, load_policy
from fastsync.ppo.__main__ import main as train_main
from fastsync.ppo.cli import Arguments, Launch, check_environment, parse
from fastsync.ppo.envs.make import make_one
from fastsync.ppo.evaluate import find_checkpoint
from fastsync.ppo.policies import make_policy
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import CheckpointFolder
from fastsync.ppo.runs.console import hints
from fastsync.ppo.runs.folder import CHECKPOINTS
from tests.ppo.test_runs_checkpoints import make_checkpoint
from tests.refused import refused
from tests.toy_envs import Payout


def test_a_command_that_is_missing_or_misspelt(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    help_text = capsys.readouterr().err
    assert main(["trian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fastsync: 'trian' is not one of train, launch, eval, export, plot, doctor; did you mean train?"
    refused(lambda: main(["--help"]), "0", kind=SystemExit)
    assert capsys.readouterr().out == help_text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["plot", "doctor"])
def test_a_reader_of_the_output_that_has_had_enough(command: str):
    """As in ``fastsync train --help | head -1``, where the output is longer than a pipe holds."""
    source = f"""
import sys
from fastsync import cli, doctor
doctor.main = lambda: print("x" * (1 << 20)) or 0
cli._plot = lambda: lambda arguments: doctor.main()
sys.exit(cli.main([{command!r}]))
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen((sys.executable, "-c", source), **pipes) as process:
        assert process.stdout.read(1) == "x"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(100)) == ("", 141)


@pytest.mark.parametrize("words", [["--lr", "3e-4"], ["--lr=3e-4"], ["--learning-rate", "3e-4"]])
def test_options_of_other_trainers_are_understood(words: list[str], tmp_path: Path):
    assert parse(Arguments, "test", words).settings.learning_rate == 3e-4
    others = ["--env-id", "Acrobot-v1", "--total_timesteps", "1e6", "--update-epochs=2", "--n-envs", "8"]
    assert parse(Launch, "test", ["--nproc_per_node", "3"]).nproc == 3
    expected = Settings(env="Acrobot-v1", total_steps=1_000_000, num_epochs=2, num_envs=8, learning_rate=3e-4)
    assert parse(Arguments, "test", [*others, *words]).settings == expected
    (tmp_path / "run.yaml").write_text("lr: 0.5\n")
    assert parse(Arguments, "test", ["--config", str(tmp_path / "run.yaml")]).settings.learning_rate == 0.5


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--render", "afterwards `fastsync eval RUN --render` plays the policy in a window"),
        ("--capture_video=yes", "afterwards `fastsync eval RUN --video FOLDER` writes videos of the policy"),
        ("--track", "name a project of Weights & Biases, by --wandb-project"),
        ("--backend=nccl", "the device decides it: --device cuda takes NCCL, and --device cpu takes fastsync"),
    ],
)
def test_options_that_belong_elsewhere_are_answered(word: str, answer: str, capsys: pytest.CaptureFixture[str]):
    refused(lambda: main(["train", word]), "2", kind=SystemExit)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fastsync train: {word.split('=')[0]}: ")
    assert line.endswith(answer)
    for word in ("--nproc", "--nproc_per_node=2"):
        refused(lambda: train_main([word, "2"]), "2", kind=SystemExit)
        said = f"{word.split('=')[0]}: this command is one rank; `fastsync train --nproc N` starts N"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "answer"),
    [
        ("MyEnv-v0", "of this name. For an environment of your own write module:name, such as MODULE:MyEnv-v0,"),
        ("my_env.MyEnv", "module:name, such as my_env:MyEnv,"),
        ("my_env.py", "file:name, such as my_env.py:NAME"),
        ("./envs/my_env.py", "file:name, such as ./envs/my_env.py:NAME"),
        ("CartPole", "did you mean CartPole-v1"),
        ("cartpole-v1", "did you mean CartPole-v1"),
        ("CartPole-v7", "did you mean CartPole-v1 or CartPole-v0?"),
        ("Taxi-v3", "Please use `Taxi-v4` instead."),
    ],
)
def test_an_environment_that_gymnasium_does_not_have_is_answered(env: str, answer: str):
    with pytest.raises(ValueError, match=rf"^env='{re.escape(env)}' cannot be made: ") as error:
        check_environment(Settings(env=env))
    assert answer in str(error.value)
    assert "Ant-v" not in str(error.value)  # which is written much like Taxi-v3
    assert "phys2d" not in str(error.value)


def test_a_file_that_is_no_checkpoint_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    for name, status, said in (
        (
            "notes.txt",
            2,
            "checkpoint='notes.txt' is a file, but no checkpoint of fastsync; they are in the folder of a",
        ),
        ("list.pt", 1, "list.pt is not a checkpoint of fastsync: it holds a list"),
        ("other.pt", 1, "other.pt is not a checkpoint of this version of fastsync: it has no environments, learner"),
    ):
        assert main(["eval", name]) == status
        assert said in capsys.readouterr().err
    assert main(["eval", "runs", "--render", "--video", "x"]) == 2
    assert capsys.readouterr().err.startswith("fastsync eval: render and video exclude each other")


@contextmanager
def spaces_of(settings: Settings) -> Iterator[tuple[Any, Any]]:
    with make_one(settings) as environments:
        yield environments.single_observation_space, environments.single_action_space


def forget(module: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
        del sys.modules[name]


def has_moviepy() -> bool:
    return find_spec("moviepy") is not None


OWN = """
import gymnasium
from fastsync.ppo import ActorCritic
class Mine(ActorCritic): pass
def make(**options): return gymnasium.make("CartPole-v1", **options)
"""


def test_a_run_is_played_from_another_folder_by_what_the_message_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (project / "own").mkdir(parents=True)
    name = f"own.of_{os.getpid()}"
    (project / name.replace(".", "/")).with_suffix(".py").write_text(OWN)
    monkeypatch.syspath_prepend(project)
    settings = Settings(policy=f"{name}:Mine", env=f"{name}:make", run_name="deep/mine")
    monkeypatch.chdir(project)
    with spaces_of(settings) as spaces:
        policy = make_policy(settings, *spaces)
    made = replace(make_checkpoint(1, settings=settings.as_dict()), learner={"model": policy.state_dict()})
    run = project / "runs" / "deep" / "mine"
    CheckpointFolder(run / CHECKPOINTS).save(made, 1.0)
    assert isinstance(load_policy(run), Policy)
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    forget(name)
    with pytest.raises(ValueError, match=f"It was trained in {project}, which has the module {name}: run this command"):
        load_policy(run)
    forget(name)
    monkeypatch.syspath_prepend(project)  # as PYTHONPATH does
    assert isinstance(load_policy(find_checkpoint(run)[0]), Policy)
    forget(name)


def test_an_environment_that_cannot_draw_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = Settings(env="tests.toy_envs:Payout")
    policy = make_policy(settings, Payout.observation_space, Payout.action_space)
    made = replace(make_checkpoint(1, settings=settings.as_dict()), learner={"model": policy.state_dict()})
    CheckpointFolder(tmp_path / CHECKPOINTS).save(made, 1.0)
    assert main(["eval", str(tmp_path), "--video", str(tmp_path / "videos")]) == 2
    assert "env='tests.toy_envs:Payout' cannot be made: TypeError: " in capsys.readouterr().err


def test_videos_are_written_or_what_they_need_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("pygame")
    settings = Settings()
    with spaces_of(settings) as spaces:
        policy = make_policy(settings, *spaces)
    made = replace(make_checkpoint(1, settings=settings.as_dict()), learner={"model": policy.state_dict()})
    CheckpointFolder(tmp_path / CHECKPOINTS).save(made, 1.0)
    status = main(["eval", str(tmp_path), "--episodes", "2", "--video", str(tmp_path / "videos")])
    said = capsys.readouterr()
    if has_moviepy():
        assert said.out.splitlines()[-1] == f"videos: {tmp_path / 'videos'}"
        assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2
    else:
        assert (status, "needs MoviePy: pip install " in said.err) == (2, True)


def test_what_comes_after_a_run_is_said_as_it_was_typed(monkeypatch: pytest.MonkeyPatch):
    for typed, said in ((".venv/bin/fastsync", ".venv/bin/fastsync"), ("/usr/bin/fastsync", "fastsync")):
        monkeypatch.setattr("sys.argv", [typed, "train"])
        assert hints(Path("runs/a b")) == [
            f"  {said} eval 'runs/a b' plays episodes with the policy",
            f"  {said} plot 'runs/a b' draws the learning curve",
        ]
    monkeypatch.setattr("sys.argv", ["own.py"])
    assert hints(Path("runs/a")) == []


def test_help_has_the_algorithm_first(capsys: pytest.CaptureFixture[str]):
    refused(lambda: main(["train", "--help"]), "0", kind=SystemExit)
    text = capsys.readouterr().out
    assert -1 < text.index("--gamma") < text.index("--learning-rate") < text.index("--lr is") < text.index("--seed")
