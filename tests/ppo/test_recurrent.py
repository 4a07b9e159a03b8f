"""Recurrent policies: what they remember in rollouts, in minibatches, in evaluations and over a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsync.ppo.envs.make import make_environments, make_one
from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment
from fastsync.ppo.evaluation import play
from fastsync.ppo.policies import ActorCritic, make_policy
from fastsync.ppo.ppo import PPO, Settings, train
from fastsync.ppo.runs.metrics import returns_of
from tests.models import group_of_one
from tests.ppo.test_runs_checkpoints import assert_same
from tests.ranks import run_ranks
from tests.refused import refused

TINY = Settings(
    env="tests.toy_envs:masked_cart_pole", recurrent="lstm", num_envs=4, num_steps=48, num_minibatches=3, num_epochs=2,
    hidden_sizes=(16, 8), lr_schedule="constant", total_steps=400,
)  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [{}, {"recurrent": "gru", "num_minibatches": 1, "norm_observations": True}, {"num_micro_batches": 2}],
    ids=str,
)
def test_minibatches_have_the_log_probabilities_of_the_rollout(given: dict[str, Any]):
    """As long as nothing is learnt: in every minibatch, also of a rollout whose episodes began in the one before."""
    settings = replace(TINY, **given)
    compared = []

    def compare(policy: Any, batch: Any, *others: Any) -> Any:
        outputs, values = policy(batch.observations, batch.states, batch.begins)
        log_probs, _ = policy.distribution.log_prob_and_entropy(outputs, batch.actions)
        torch.testing.assert_close(log_probs, batch.log_probs, rtol=0, atol=1e-6)
        torch.testing.assert_close(values, batch.values, rtol=0, atol=1e-6)
        compared.append(len(values))
        return outputs.sum() * 0, {}

    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
        ppo.minibatch_loss = compare
        for _ in range(2):
            (rollout,) = ppo.collect()
            if ppo.policy.normalizer is not None:
                ppo.policy.normalizer.learn = lambda *given: None  # type: ignore[method-assign]
            assert rollout.states is not None
            begins = ~rollout.valid[:-1]
            assert begins.any()
            assert not rollout.states[1:][begins].any()
            assert rollout.states[1:][~begins].any(-1).all()
            ppo.learn([rollout])
        assert rollout.states[0].any(-1).any()
    num_parts = settings.num_minibatches * settings.num_micro_batches
    assert compared == [4 * 48 // num_parts] * (2 * 2 * num_parts)


def test_a_policy_remembers_in_evaluations_as_in_act(tmp_path: Path):
    settings = replace(TINY, runs_dir=str(tmp_path), run_name="run")
    with group_of_one():
        train(settings, torch.device("cpu"))
    policy, (_, checkpoint) = load_policy(tmp_path / "run", newest=True), find_checkpoint(tmp_path / "run", newest=True)
    with make_environment(checkpoint, tmp_path, seed=3) as environment:
        expected = returns_of(play(policy, environment, 3))
    returns, memory = list[float](), policy.new_memory()
    with make_environment(checkpoint, tmp_path, seed=3) as environment:
        observations = environment.reset()
        while len(returns) < 3:
            step = environment.step(policy.act(observations, memory=memory))
            observations = step.observations
            if not step.valid[0]:
                memory.reset()
            returns += returns_of(step.episodes)
    assert returns == expected

    one = torch.zeros(2).numpy()
    refused(lambda: policy.act(one), "memory: this policy is recurrent")
    refused(lambda: policy.act(one, memory=policy.new_memory(2)), "memory: it is of 2 environments", "1 observations")


def test_a_resumed_run_remembers_what_it_had_seen(tmp_path: Path):
    whole = replace(TINY, runs_dir=str(tmp_path), run_name="whole", total_steps=800)
    stopped = replace(whole, run_name="stopped", total_steps=400, checkpoint_interval=0, resume="auto")
    with group_of_one():
        learnt, _ = train(whole, torch.device("cpu"))
        train(stopped, torch.device("cpu"))
        resumed, _ = train(replace(stopped, total_steps=800), torch.device("cpu"))
    assert_same(dict(resumed.state_dict()), dict(learnt.state_dict()))


class Forgetful(ActorCritic):
    """Leaves out what it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.recurrent = None


def test_settings_that_do_not_go_together_are_refused():
    refused(lambda: replace(TINY, network="separate"), "recurrent='lstm'", "network")
    refused(lambda: replace(TINY, num_minibatches=5, num_envs=5), "num_minibatches=5 does not divide the 48 rows")
    refused(lambda: replace(TINY, num_micro_batches=8), "num_micro_batches=8 does not divide the 4 rows of sequences")
    with make_one(TINY) as environment:
        spaces = environment.single_observation_space, environment.single_action_space
    refused(lambda: make_policy(TINY, *spaces, Forgetful), "recurrent='lstm'", "has no recurrent layers")


LEARNS = Settings(
    env="tests.toy_envs:masked_cart_pole", total_steps=150_000, num_envs=4, num_steps=128, num_minibatches=4,
    learning_rate=2e-3, gamma=0.98, gae_lambda=0.9, eval_interval=30_000, eval_episodes=20,
)  # fmt: skip


def train_one(rank: int, world_size: int, settings: Settings) -> None:
    train(settings, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recurrent", "least", "most"), [("lstm", 400, 500), ("gru", 400, 500), ("none", 0, 100)])
def test_hidden_velocities_are_found_by_what_remembers_and_by_nobody_else(
    tmp_path: Path, recurrent: Any, least: float, most: float
):
    run_ranks(train_one, 2, replace(LEARNS, recurrent=recurrent, runs_dir=str(tmp_path), run_name="run"), timeout=800)
    assert least <= find_checkpoint(tmp_path / "run")[1].best_return <= most
