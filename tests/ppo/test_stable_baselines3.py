"""An update beside Stable-Baselines3's: from the same rollout and in the same minibatches come the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO as StableBaselines3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor

from fastsync.ppo import fused
from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.ppo import PPO, Rollout, Settings, Shuffler
from tests.models import group_of_one

NUM_ENVS, NUM_STEPS, NUM_MINIBATCHES, NUM_EPOCHS = 4, 64, 8, 5
TRUNCATED_VF_COEF, TRUNCATED_CLIP = 0.01, 0.04  # so small that the policy's gradients count, and are clipped
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
@pytest.mark.parametrize("max_episode_steps", [None, 15], ids=["plain", "truncated"])
def test_an_update_moves_the_weights_as_theirs_does(
    env: str, is_fused: bool, max_episode_steps: int | None, monkeypatch: pytest.MonkeyPatch
):
    """If episodes are truncated, advantages are normalised, and our rollout has rows that only reset environments."""
    is_truncated = max_episode_steps is not None
    theirs = make_theirs(env, max_episode_steps)
    rollout = collect(theirs)
    assert bool((rollout.done & ~rollout.terminated).any()) == is_truncated
    before = weights_of(theirs)
    orders = list[Tensor]()
    permutation = np.random.permutation

    def recorded(number: int) -> Any:
        order = permutation(number)  # of rows that are sorted by environment; ours are by step
        orders.append(torch.from_numpy(order % NUM_STEPS * NUM_ENVS + order // NUM_STEPS))
        return order

    monkeypatch.setattr(np.random, "permutation", recorded)
    theirs.train()
    if is_truncated:
        rollout, rows, resets = with_resets(rollout)
        orders = [with_equal_parts(rows[order], resets) for order in orders]
    monkeypatch.setattr(Shuffler, "_row_orders", lambda *_: orders)
    monkeypatch.setattr(fused, "_is_enabled", is_fused)
    settings = Settings(
        env=env, num_envs=NUM_ENVS, num_steps=len(rollout.valid), num_minibatches=NUM_MINIBATCHES,
        num_epochs=NUM_EPOCHS, learning_rate=3e-3, lr_schedule="constant", gamma=0.99, gae_lambda=0.9, ent_coef=0.01,
        # Theirs is a weight of the squared error, ours of a half of it.
        vf_coef=TRUNCATED_VF_COEF if is_truncated else 1.0, clip_coef=TRUNCATED_CLIP if is_truncated else 0.2,
        clip_value_loss=not is_truncated,  # theirs has no max() there, which counts after larger steps
        norm_advantages="minibatch" if is_truncated else "none", hidden_sizes=(16, 16),
        fused=is_fused,
    )  # fmt: skip
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
        ppo.policy.load_state_dict(before)
        metrics = ppo.learn([rollout])
        assert metrics["clip_fraction"] > 0.05  # so both sides of the clipping count
        after = weights_of(theirs)
        for name, weight in ppo.policy.state_dict().items():
            moved = (after[name] - before[name]).norm()
            assert moved > 0
            assert (weight - after[name]).norm() < 1e-4 * moved, name


def make_theirs(env: str, max_episode_steps: int | None) -> StableBaselines3:
    kwargs, other = {}, {"normalize_advantage": False, "clip_range_vf": 0.2}
    if max_episode_steps is not None:
        kwargs, other = (
            {"max_episode_steps": max_episode_steps},
            {"vf_coef": TRUNCATED_VF_COEF / 2, "clip_range": TRUNCATED_CLIP},
        )
    return StableBaselines3(
        "MlpPolicy", make_vec_env(env, NUM_ENVS, seed=1, env_kwargs=kwargs), n_steps=NUM_STEPS,
        batch_size=NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES, n_epochs=NUM_EPOCHS, learning_rate=3e-3, gamma=0.99,
        gae_lambda=0.9, ent_coef=0.01, seed=1, device="cpu", policy_kwargs={"net_arch": [16, 16]}, **other,
    )  # fmt: skip


class Ends(BaseCallback):
    """Notes the rewards before theirs adds values of truncated ends, and these ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards, self.truncated = list[Tensor](), list[list[bool]]()
        self.last_observations: dict[tuple[int, int], Any] = {}

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        for index, info in enumerate(infos):
            if "terminal_observation" in info:
                self.last_observations[len(self.rewards), index] = info["terminal_observation"]
        self.rewards.append(torch.from_numpy(self.locals["rewards"].copy()))
        self.truncated.append([bool(info.get("TimeLimit.truncated")) for info in infos])
        return True


def collect(theirs: StableBaselines3) -> Rollout:
    """A rollout of theirs as ours, without rows for resets."""
    _, callback = theirs._setup_learn(NUM_ENVS * NUM_STEPS, ends := Ends())
    buffer: Any = theirs.rollout_buffer
    theirs.collect_rollouts(theirs.env, callback, buffer, NUM_STEPS)
    rows = {
        name: torch.from_numpy(getattr(buffer, name).copy())
        for name in ("observations", "actions", "values", "log_probs", "episode_starts")
    }
    starts = torch.cat([rows["episode_starts"], torch.from_numpy(theirs._last_episode_starts).unsqueeze(0)])
    done = starts[1:].bool()
    with torch.no_grad():
        last = theirs.policy.predict_values(torch.from_numpy(theirs._last_obs)).T
        next_values = torch.cat([rows["values"][1:], last])
        for at, observation in ends.last_observations.items():
            next_values[at] = theirs.policy.predict_values(torch.from_numpy(observation).unsqueeze(0)).item()
    is_discrete = rows["actions"].shape[-1] == 1 and hasattr(theirs.action_space, "n")
    return Rollout(
        observations=rows["observations"],
        actions=rows["actions"].squeeze(-1).long() if is_discrete else rows["actions"],
        values=rows["values"],
        rewards=torch.stack(ends.rewards),
        terminated=done & ~torch.tensor(ends.truncated),
        done=done,
        valid=torch.ones(NUM_STEPS, NUM_ENVS, dtype=torch.bool),
        log_probs=rows["log_probs"],
        next_values=next_values,
        episodes=[],
        infos={},
        environment_seconds=0.0,
        policy_seconds=0.0,
        ended=0.0,
    )


def with_resets(rollout: Rollout) -> tuple[Rollout, Tensor, Tensor]:
    """Adds a row after the end of each episode, and more at the beginning until environments have equally many.

    Returns:
        The rollout, where its earlier rows are now, and where the added ones are. Both are indices of flat rows.
    """
    num_added = rollout.done[:-1].sum(0).max().item()
    num_added += num_added % 2  # so that minibatches have equally many
    source = torch.full((NUM_STEPS + num_added, NUM_ENVS), -1)
    for index, done in enumerate(rollout.done.T.tolist()):
        column = [row for step, ended in enumerate(done) for row in ([step, -1] if ended else [step])]
        column = column[:-1] if done[-1] else column
        source[len(source) - len(column) :, index] = torch.tensor(column)
    valid, rows = source >= 0, source.clamp(min=0)
    environments = torch.arange(NUM_ENVS).expand_as(rows)
    columns = {
        name: column[rows, environments] for name, column in rollout._asdict().items() if isinstance(column, Tensor)
    }
    added = rollout._replace(**columns)
    for column in (added.rewards, added.values, added.next_values):
        column[~valid] = 7.0  # must reach no other row
    added = added._replace(valid=valid, done=added.done & valid, terminated=added.terminated & valid)
    places = torch.empty(NUM_STEPS * NUM_ENVS, dtype=torch.long)
    places[(rows * NUM_ENVS + environments)[valid]] = valid.flatten().nonzero()[:, 0]
    return added, places, (~valid).flatten().nonzero()[:, 0]


def with_equal_parts(order: Tensor, more: Tensor) -> Tensor:
    """Adds equally many of more rows to each minibatch of an order."""
    parts = zip(order.chunk(NUM_MINIBATCHES), more.chunk(NUM_MINIBATCHES), strict=True)
    return torch.cat([row for part in parts for row in part])


def weights_of(theirs: StableBaselines3) -> dict[str, Tensor]:
    """Their weights by our names."""
    named = dict(theirs.policy.named_parameters())
    weights = {
        f"{mine}.{kind}": named[f"{other}.{kind}"] for mine, other in LAYERS.items() for kind in ("weight", "bias")
    }
    if "log_std" in named:
        weights["distribution.log_std"] = named["log_std"]
    return {name: weight.detach().clone() for name, weight in weights.items()}
