"""An update beside Stable-Baselines3's: from the same rollout and in the same minibatches come the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO as StableBaselines3
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor

from fastsync.ppo import fused
from fastsync.ppo.batches import Shuffler
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.ppo import PPO, Rollout, Settings
from tests.models import group_of_one

NUM_ENVS, NUM_STEPS, NUM_MINIBATCHES, NUM_EPOCHS = 4, 64, 8, 5
LAYERS = {
    "actor.0": "mlp_extractor.policy_net.0",
    "actor.2": "mlp_extractor.policy_net.2",
    "actor.4": "action_net",
    "critic.0": "mlp_extractor.value_net.0",
    "critic.2": "mlp_extractor.value_net.2",
    "critic.4": "value_net",
}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_update_moves_the_weights_as_theirs_does(env: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch):
    theirs = make_theirs(env)
    rollout = collect(theirs)
    before = weights_of(theirs)
    orders = list[Tensor]()
    permutation = np.random.permutation

    def recorded(number: int) -> Any:
        order = permutation(number)  # of rows that are sorted by environment; ours are by step
        orders.append(torch.from_numpy(order % NUM_STEPS * NUM_ENVS + order // NUM_STEPS))
        return order

    monkeypatch.setattr(np.random, "permutation", recorded)
    theirs.train()
    monkeypatch.setattr(Shuffler, "_row_orders", lambda *_: orders)
    monkeypatch.setattr(fused, "_is_enabled", is_fused)
    settings = Settings(
        env=env, num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_minibatches=NUM_MINIBATCHES, num_epochs=NUM_EPOCHS,
        learning_rate=3e-3, lr_schedule="constant", gamma=0.99, gae_lambda=0.9, ent_coef=0.01,
        vf_coef=1.0,  # theirs is a weight of the squared error, ours of a half of it
        clip_value_loss=True, norm_advantages=False, hidden_sizes=(16, 16), fused=is_fused,
    )  # fmt: skip
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, environments, torch.device("cpu"))
        ppo.policy.load_state_dict(before)
        metrics = ppo.learn(rollout)
        assert metrics["clip_fraction"] > 0.05  # so both sides of the clipping count
        after = weights_of(theirs)
        for name, weight in ppo.policy.state_dict().items():
            moved = (after[name] - before[name]).norm()
            assert moved > 0
            assert (weight - after[name]).norm() < 1e-4 * moved, name


def make_theirs(env: str) -> StableBaselines3:
    return StableBaselines3(
        "MlpPolicy", make_vec_env(env, NUM_ENVS, seed=1), n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES, n_epochs=NUM_EPOCHS, learning_rate=3e-3, gamma=0.99,
        gae_lambda=0.9, ent_coef=0.01, clip_range_vf=0.2, normalize_advantage=False, seed=1, device="cpu",
        policy_kwargs={"net_arch": [16, 16]},
    )  # fmt: skip


def collect(theirs: StableBaselines3) -> Rollout:
    """A rollout of theirs as ours. No episode was truncated meanwhile."""
    _, callback = theirs._setup_learn(NUM_ENVS * NUM_STEPS)
    buffer: Any = theirs.rollout_buffer
    theirs.collect_rollouts(theirs.env, callback, buffer, NUM_STEPS)
    rows = {
        name: torch.from_numpy(getattr(buffer, name).copy())
        for name in ("observations", "actions", "rewards", "values", "log_probs", "episode_starts")
    }
    starts = torch.cat([rows["episode_starts"], torch.from_numpy(theirs._last_episode_starts).unsqueeze(0)])
    done = starts[1:].bool()
    with torch.no_grad():
        last = theirs.policy.predict_values(torch.from_numpy(theirs._last_obs)).T
    is_discrete = rows["actions"].shape[-1] == 1 and hasattr(theirs.action_space, "n")
    return Rollout(
        observations=rows["observations"],
        actions=rows["actions"].squeeze(-1).long() if is_discrete else rows["actions"],
        values=rows["values"],
        rewards=rows["rewards"],
        terminated=done,
        done=done,
        valid=torch.ones(NUM_STEPS, NUM_ENVS, dtype=torch.bool),
        log_probs=rows["log_probs"],
        next_values=torch.cat([rows["values"][1:], last]),
        episodes=[],
        infos={},
        environment_seconds=0.0,
        policy_seconds=0.0,
        ended=0.0,
    )


def weights_of(theirs: StableBaselines3) -> dict[str, Tensor]:
    """Their weights by our names."""
    named = dict(theirs.policy.named_parameters())
    weights = {
        f"{mine}.{kind}": named[f"{other}.{kind}"] for mine, other in LAYERS.items() for kind in ("weight", "bias")
    }
    if "log_std" in named:
        weights["distribution.log_std"] = named["log_std"]
    return {name: weight.detach().clone() for name, weight in weights.items()}
