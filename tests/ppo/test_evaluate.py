"""Playing with a trained policy: the right checkpoint, the right actions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

import fastsync.ppo.evaluation as evaluating
from fastsync.cli import main
from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.evaluate import find_checkpoint, make_environment, restore_policy
from fastsync.ppo.evaluation import play
from fastsync.ppo.policies import ActorCritic, make_policy
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import CHECKPOINTS
from fastsync.ppo.runs.metrics import returns_of
from tests.ppo.test_runs_checkpoints import make_checkpoint
from tests.toy_envs import Endless, Faulty, Payout

DISCRETE = Settings(env="tests.toy_envs:Payout")


def checkpoint_of(policy: ActorCritic, step: int = 1000) -> Checkpoint:
    made = make_checkpoint(step, settings=DISCRETE.as_dict())
    return replace(made, learner=made.learner | {"model": policy.state_dict()})


def evaluate(policy: ActorCritic, episodes: int) -> list[Episode]:
    checkpoint = checkpoint_of(policy)
    here = Path("here")
    with make_environment(checkpoint, here, seed=0) as environment:
        return play(restore_policy(checkpoint, here, environment), environment, episodes)


def leaning_to_1(bias: float) -> ActorCritic:
    """A policy that prefers action 1 by so much."""
    policy = make_policy(DISCRETE, Payout.observation_space, Payout.action_space)
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([0.0, bias]))
    return policy


def test_the_likeliest_actions_are_taken():
    assert [tuple(each[1:3]) for each in evaluate(leaning_to_1(0.1), 3)] == [(31.0, 5)] * 3
    assert returns_of(evaluate(leaning_to_1(-0.1), 1)) == [0.0]


def test_the_best_checkpoint_of_a_run_is_taken_or_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = CheckpointFolder(tmp_path / CHECKPOINTS, keep=3)
    files = [
        folder.save(checkpoint_of(leaning_to_1(bias), step), mean_return)
        for bias, step, mean_return in ((1.0, 1000, 31.0), (-1.0, 2000, 0.0))
    ]
    assert find_checkpoint(tmp_path, newest=True)[0] == find_checkpoint(files[1])[0] == files[1]
    for named in (tmp_path, tmp_path / CHECKPOINTS):
        assert find_checkpoint(named)[1].step == 1000
    assert main(["eval", str(tmp_path), "--episodes", "2", "--newest"]) == 0
    assert main(["eval", str(files[0]), "--episodes", "1"]) == 0
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 0
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    newest, named, best = capsys.readouterr().out.splitlines()
    assert "after 2,000 steps, likeliest actions: return 0.00 ± 0.00 over 2 episodes of 5.0 steps" in newest
    assert "after 1,000 steps, likeliest actions: return 31.00 ± 0.00 over 1 episode of 5.0 steps" in named
    assert best == named.replace("steps, likeliest", "steps, the best checkpoint, likeliest", 1)
    # Nobody misses a damaged one as long as there is another.
    (tmp_path / CHECKPOINTS / "best.pt").write_bytes(b"half")
    assert find_checkpoint(tmp_path)[1].step == 2000
    assert "best.pt is damaged" in capsys.readouterr().err


def test_another_environment_with_the_same_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    CheckpointFolder(tmp_path / CHECKPOINTS).save(checkpoint_of(leaning_to_1(1.0), 1000), 31.0)
    assert main(["eval", str(tmp_path), "--episodes", "1", "--env", f"{__name__}:Halved"]) == 0
    assert f"{__name__}:Halved after 1,000 steps" in (said := capsys.readouterr().out)
    assert "return 15.50 ± 0.00" in said
    assert main(["eval", str(tmp_path), "--env", "Pendulum-v1"]) == 2
    other = f"env='Pendulum-v1' has observations or actions of another kind than {DISCRETE.env!r}"
    assert other in capsys.readouterr().err


class Halved(Payout):
    def step(self, action: Any):
        observation, reward, *ends = super().step(action)
        return observation, reward / 2, *ends


def test_an_episode_that_never_ends_is_cut_and_progress_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluating, "PROGRESS_SECONDS", 0.0)
    settings = replace(DISCRETE, env="tests.toy_envs:Endless")
    made = make_checkpoint(1000, settings=settings.as_dict())
    policy = make_policy(settings, Endless.observation_space, Endless.action_space)
    CheckpointFolder(tmp_path / CHECKPOINTS).save(replace(made, learner={"model": policy.state_dict()}), 0.0)
    assert main(["eval", str(tmp_path), "--episodes", "2", "--max-steps", "7"]) == 0
    said = capsys.readouterr()
    assert "return 7.00 ± 0.00 over 2 episodes of 7.0 steps" in said.out
    lines = said.err.splitlines()
    assert lines[0] == "fastsync eval: 0 of 2 episodes have ended, and 1 steps of the next are done"
    (cut,) = (number for number, line in enumerate(lines) if "has not ended" in line)
    assert lines[cut] == "fastsync eval: episode 1 has not ended after 7 steps, and counts as it is."
    assert lines[cut + 1].startswith("  --max-steps cuts episodes elsewhere.")
    assert lines[-1] == "fastsync eval: 2 of 2 episodes were cut after 7 steps"
    assert max(map(len, lines)) <= 100


def with_statistics() -> Any:
    return NormalizeReward(NormalizeObservation(Payout()))


def test_statistics_of_an_environments_own_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = replace(DISCRETE, env=f"{__name__}:with_statistics", num_envs=2)
    with make_environments(settings, rank=0) as environments:
        (note,) = environments.notes
    assert note.startswith("warning: NormalizeReward and NormalizeObservation in env='tests.ppo.test_evaluate:with_")
    made = make_checkpoint(1000, settings=settings.as_dict())
    made = replace(made, learner={"model": leaning_to_1(1.0).state_dict()})
    CheckpointFolder(tmp_path / CHECKPOINTS).save(made, 0.0)
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 0
    assert note in capsys.readouterr().err
    with make_environments(DISCRETE, rank=0) as environments:
        assert not environments.notes


def test_an_environment_that_fails_is_named_behind_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = Settings(env="tests.toy_envs:Faulty")
    policy = make_policy(settings, Faulty.observation_space, Faulty.action_space)
    made = replace(make_checkpoint(1000, settings=settings.as_dict()), learner={"model": policy.state_dict()})
    CheckpointFolder(tmp_path / CHECKPOINTS).save(made, 0.0)
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback")
    where = "environment 0 of the evaluation (Faulty) failed in step 2 of episode 0"
    assert last == f"fastsync eval: {where}: KeyError: 'of my own'"


def test_runs_are_named_where_none_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["eval"]) == 2
    assert capsys.readouterr().err == (
        "fastsync eval: say which run to play; the folder 'runs' has none here: `fastsync train` makes one\n"
    )
    for age, name in enumerate(["newest", "of mine/and old", *map(str, range(5))]):
        CheckpointFolder(Path("runs") / name / CHECKPOINTS, keep=1).save(checkpoint_of(leaning_to_1(1.0)), 1.0)
        os.utime(Path("runs") / name / CHECKPOINTS, (2_000_000_000 - age, 2_000_000_000 - age))
    listed = ["runs/newest", "'runs/of mine/and old'", "runs/0", "runs/1", "runs/2"]
    for words, said in (([], "say which run to play"), (["runs/new"], "checkpoint='runs/new' is neither a ")):
        assert main(["eval", *words]) == 2
        first, *lines = capsys.readouterr().err.splitlines()
        assert first.startswith(f"fastsync eval: {said}")
        assert first.endswith("; the newest here:")
        assert lines == [f"  fastsync eval {each}" for each in listed]
