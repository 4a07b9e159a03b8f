"""Playing with a trained policy: the right checkpoint, the right actions."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.utils import RunningMeanStd

import fastsync.ppo.evaluation as evaluating
from fastsync.cli import main
from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.envs.lookup import refuse_running_statistics
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment, restore_policy
from fastsync.ppo.evaluation import play
from fastsync.ppo.policies import ActorCritic, make_policy
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import CHECKPOINTS
from fastsync.ppo.runs.metrics import returns_of
from tests.ppo.test_runs_checkpoints import make_checkpoint
from tests.toy_envs import Endless, Faulty, Payout

DISCRETE = Settings(env="tests.toy_envs:Payout")


def checkpoint_of(policy: ActorCritic, step: int = 1000, **changes: Any) -> Checkpoint:
    made = make_checkpoint(step, settings=replace(DISCRETE, **changes).as_dict())
    return replace(made, learner=made.learner | {"model": policy.state_dict()})


def saved(folder: Path, policy: ActorCritic | None = None, **changes: Any) -> None:
    """A run whose policy takes action 1, unless another one is given."""
    policy = policy or leaning_to_1(1.0)
    CheckpointFolder(folder / CHECKPOINTS).save(checkpoint_of(policy, **changes), 31.0)


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
    saved(tmp_path)
    assert main(["eval", str(tmp_path), "--episodes", "1", "--env", f"{__name__}:Halved"]) == 0
    assert f"{__name__}:Halved after 1,000 steps" in (said := capsys.readouterr().out)
    assert "return 15.50 ± 0.00" in said
    kwargs = json.dumps({"factor": 3.0})
    assert main(["eval", str(tmp_path), "--episodes", "1", "--env", f"{__name__}:Times", "--env-kwargs", kwargs]) == 0
    assert "return 93.00 ± 0.00" in capsys.readouterr().out
    for wrong, why in {
        "Pendulum-v1": "env='Pendulum-v1' has observations Box",
        "tests.toy_envs:Binary": "env='tests.toy_envs:Binary' has actions MultiBinary",
        f"{__name__}:TwoChoices": f"env='{__name__}:TwoChoices' has actions MultiDiscrete([1 1]), and the training's",
        "": "env='' cannot be made: it has no name",
    }.items():
        assert main(["eval", str(tmp_path), "--env", wrong]) == 2
        assert why in capsys.readouterr().err


def test_another_environment_where_the_trainings_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, env="gone:Away")
    assert main(["eval", str(tmp_path), "--episodes", "1", "--env", f"{__name__}:Halved"]) == 0
    assert "return 15.50 ± 0.00" in capsys.readouterr().out
    assert main(["eval", str(tmp_path), "--env", "Pendulum-v1"]) == 2
    assert "the checkpoint's weights do not fit" in capsys.readouterr().err


class Times(Payout):
    """An environment with an argument."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def step(self, action: Any):
        observation, reward, *ends = super().step(action)
        return observation, reward * self.factor, *ends


class TwoChoices(Payout):
    """As many outputs as the training's environment, and other actions."""

    action_space = gymnasium.spaces.MultiDiscrete([1, 1])


class Halved(Payout):
    def step(self, action: Any):
        observation, reward, *ends = super().step(action)
        return observation, reward / 2, *ends


def test_an_episode_that_never_ends_is_cut_and_progress_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluating, "PROGRESS_SECONDS", 0.0)
    policy = make_policy(DISCRETE, Endless.observation_space, Endless.action_space)
    saved(tmp_path, policy, env="tests.toy_envs:Endless")
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


class OwnNormalizer(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A user's wrapper, which fastsync.ppo cannot replace by a setting."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.statistics = RunningMeanStd(shape=env.observation_space.shape)

    def observation(self, observation: Any) -> Any:
        return observation


def with_statistics() -> Any:
    return NormalizeReward(NormalizeObservation(Payout()))


def with_frozen_statistics() -> Any:
    env = NormalizeObservation(Payout())
    env.update_running_mean = False  # by a user who has loaded them
    return env


def with_statistics_of_its_own() -> Any:
    return OwnNormalizer(Payout())


def test_a_training_refuses_statistics_that_no_checkpoint_has():
    with pytest.raises(ValueError, match="has_them' normalises by") as refused:
        refuse_running_statistics("has_them", with_statistics())
    assert "NormalizeReward and NormalizeObservation, whose running statistics no checkpoint" in str(refused.value)
    assert "set --norm-rewards and --norm-observations: these" in str(refused.value)
    with pytest.raises(ValueError, match="set --norm-rewards and --norm-observations"):
        make_environments(replace(DISCRETE, env=f"{__name__}:with_statistics", num_envs=2), rank=0)
    with make_environments(replace(DISCRETE, env=f"{__name__}:with_frozen_statistics"), rank=0) as environments:
        assert not environments.notes


@pytest.mark.parametrize("kind", ["with_statistics", "with_statistics_of_its_own"])
def test_who_plays_is_warned_of_statistics_that_the_checkpoint_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    settings = replace(DISCRETE, env=f"{__name__}:{kind}", num_envs=2)
    if kind == "with_statistics_of_its_own":
        with make_environments(settings, rank=0) as environments:
            (note,) = environments.notes
        assert note.startswith(f"warning: OwnNormalizer in env='{__name__}:{kind}' normalises by running statistics")
    saved(tmp_path, env=settings.env, num_envs=2)
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 0
    assert f"env='{__name__}:{kind}' normalises by running statistics" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="normalises by running statistics of each copy"):
        load_policy(tmp_path)


def test_the_option_that_replaces_a_wrapper_of_ones_own():
    class Own(NormalizeObservation[Any, Any, Any]):
        pass

    with pytest.raises(ValueError, match=r"by Own and NormalizeObservation, .* set --norm-observations: these"):
        refuse_running_statistics("own", Own(NormalizeObservation(Payout())))


class Noisy(Payout):
    """Pays by a generator that the process shares."""

    def step(self, action: Any):
        observation, _, *ends = super().step(action)
        return observation, float(np.random.rand()), *ends  # noqa: NPY002


def test_the_seed_counts_in_another_environment_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, env=f"{__name__}:Noisy")
    returns = []
    for options in (["--seed", "1"], ["--seed", "1", "--env", f"{__name__}:Noisy"], ["--seed", "2"]):
        assert main(["eval", str(tmp_path), "--episodes", "1", *options]) == 0
        returns.append(capsys.readouterr().out.partition("return ")[2])
    assert returns[0] == returns[1] != returns[2]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path)
    (tmp_path / "out.mp4").write_text("")
    drawn = ["--env", f"{__name__}:Drawn", "--video", str(tmp_path / "out.mp4")]
    assert main(["eval", str(tmp_path), "--episodes", "1", *drawn]) == 2
    assert "out.mp4' cannot be written: " in capsys.readouterr().err


def test_what_drawing_needs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path)
    assert main(["eval", str(tmp_path), "--env", f"{__name__}:DrawnByNobody", "--render"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "pygame is not installed; install what drawing needs: pip install" in said


class Drawn(Payout):
    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode


class DrawnByNobody(Drawn):
    def reset(self, **given: Any):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")


def test_an_environment_that_fails_is_named_behind_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    policy = make_policy(DISCRETE, Faulty.observation_space, Faulty.action_space)
    saved(tmp_path, policy, env="tests.toy_envs:Faulty")
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
    assert main(["eval", "runs/new"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("fastsync eval: checkpoint='runs/new' is neither a ")
    assert first.endswith("; the newest here:")
    assert lines == [*(f"  fastsync eval {each}" for each in listed), "  … and 2 more"]
    assert main(["eval"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"fastsync eval {each}" for each in (*listed, "runs/3", "runs/4")]
    assert main(["eval", "newest"]) == 2
    assert "; `fastsync eval runs/newest` plays the run of that name; the newest here:" in capsys.readouterr().err
