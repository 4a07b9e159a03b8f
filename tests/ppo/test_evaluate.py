"""Playing with a trained policy: the right checkpoint, the right actions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsync.cli import main
from fastsync.ppo.envs.lookup import find_env
from fastsync.ppo.evaluate import Evaluation, find_checkpoint, load_policy, make_environment, play
from fastsync.ppo.policies import ActorCritic, make_policy
from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.checkpoints import Checkpoint, CheckpointFolder
from fastsync.ppo.runs.folder import CHECKPOINTS
from tests.played_envs import LENGTH

DISCRETE = Settings(env="tests.played_envs:discrete")


def policy_for(settings: Settings) -> ActorCritic:
    env = find_env(settings.env).make()
    torch.manual_seed(3)
    return make_policy(settings, env.observation_space, env.action_space)


def checkpoint_of(policy: ActorCritic, settings: Settings, step: int = 1000) -> Checkpoint:
    return Checkpoint(
        settings=settings.as_dict(),
        world_size=1,
        step=step,
        update=1,
        seconds=1.0,
        learner={"model": policy.state_dict(), "optimizer": {}, "scaler": {}, "sync": {}, "schedule": {}}
        | {"rewards": {}, "num_draws": 0},
        environments=[{"environments": {}}],
        window=[],
    )


def evaluate(settings: Settings, policy: ActorCritic, episodes: int, **options: object) -> Evaluation:
    checkpoint = checkpoint_of(policy, settings)
    with make_environment(checkpoint, seed=0) as environment:
        return play(load_policy(checkpoint, environment), environment, episodes, **options)


def leaning_to_1(bias: float, settings: Settings = DISCRETE) -> ActorCritic:
    """A policy that prefers action 1 by so much."""
    policy = policy_for(settings)
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([0.0, bias]))
    return policy


def test_the_likeliest_actions_are_taken():
    assert evaluate(DISCRETE, leaning_to_1(0.1), 3) == Evaluation([31.0] * 3, [LENGTH] * 3)
    assert evaluate(DISCRETE, leaning_to_1(-0.1), 1).returns == [0.0]


def test_actions_can_be_drawn():
    policy = leaning_to_1(0.0)
    first, again, other = (evaluate(DISCRETE, policy, 20, stochastic=True, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.returns != other.returns
    # The bits of a return are the actions.
    ones = sum(int(value).bit_count() for value in first.returns)
    assert 30 < ones < 70
    assert evaluate(DISCRETE, leaning_to_1(50.0), 3, stochastic=True).returns == [31.0] * 3


def test_a_normalised_policy_sees_what_it_saw_in_training():
    settings = replace(DISCRETE, norm_observations=True, precision="fp64")
    policy = policy_for(settings)
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 1.0]))
        # Observations are NaN once normalised, and so is the policy, whose likeliest action then is 0.
        assert policy.normalizer is not None
        for buffer in policy.normalizer.buffers():
            buffer.fill_(float("nan"))
    assert evaluate(settings, policy, 1).returns == [0.0]


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = CheckpointFolder(tmp_path / CHECKPOINTS, keep=3)
    files = [
        folder.save(checkpoint_of(leaning_to_1(bias), DISCRETE, step), mean_return)
        for bias, step, mean_return in ((1.0, 1000, 31.0), (-1.0, 2000, 0.0))
    ]
    for named in (tmp_path, files[1]):
        assert find_checkpoint(named).step == 2000
    assert main(["eval", str(tmp_path), "--episodes", "2"]) == 0
    assert main(["eval", str(files[0]), "--episodes", "1"]) == 0
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "tests.played_envs:discrete after 2,000 steps, likeliest actions: return 0.00 ± 0.00 over 2 episodes "
        "of 5.0 steps",
        "tests.played_envs:discrete after 1,000 steps, likeliest actions: return 31.00 ± 0.00 over 1 episode "
        "of 5.0 steps",
    ]


def test_a_damaged_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = CheckpointFolder(tmp_path / CHECKPOINTS, keep=1).save(checkpoint_of(leaning_to_1(1.0), DISCRETE), 0.0)
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["eval", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fastsync eval: ")
    assert file.name in said
    assert said.count("\n") == 1
