"""The loss against its definition row by row, and the weights that make ranks and minibatches count alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from fastsync.ppo.envs.make import make_environments
from fastsync.ppo.fused import METRICS
from fastsync.ppo.policies import Policy, make_policy
from fastsync.ppo.ppo import PPO, Batch, Settings, Shuffler, minibatch_loss, ppo_loss, row_weights
from tests.models import group_of_one

SETTINGS = Settings(clip_value_loss=False, ent_coef=0.03, vf_coef=0.7, precision="fp64", hidden_sizes=(16, 16))
OBSERVATIONS = spaces.Box(-1, 1, (4,))


def sample(num_rows: int, *, seed: int = 0) -> tuple[Policy, Batch]:
    """A policy, and rows whose probability ratios lie on both sides of the clipping range. A third is not valid."""
    torch.manual_seed(seed)
    policy = make_policy(SETTINGS, OBSERVATIONS, spaces.Discrete(3))
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100)
    valid = torch.arange(num_rows) % 3 != 0
    batch = Batch(
        observations=torch.randn(num_rows, 4, dtype=torch.float64),
        actions=torch.randint(3, (num_rows,)),
        log_probs=-torch.rand(num_rows, dtype=torch.float64) * 2,
        values=torch.randn(num_rows, dtype=torch.float64),
        advantages=torch.randn(num_rows, dtype=torch.float64),
        returns=torch.randn(num_rows, dtype=torch.float64),
        weights=row_weights(valid, valid.sum(), world_size=1, num_minibatches=1).double(),
    )
    return policy, batch


def loss_of(policy: Policy, batch: Batch, settings: Settings = SETTINGS) -> tuple[Tensor, Tensor]:
    loss, figures = minibatch_loss(policy, batch, settings, 1.0, ppo_loss)
    return loss, torch.stack(list(figures.values()))


def gradients(policy: Policy, batch: Batch) -> list[Tensor]:
    loss, _ = loss_of(policy, batch)
    return list(torch.autograd.grad(loss, list(policy.parameters())))


def test_loss_is_the_mean_over_valid_rows():
    policy, batch = sample(30)
    loss, losses = loss_of(policy, batch)
    with torch.no_grad():
        logits, values = policy(batch.observations)
    sums = dict.fromkeys(METRICS, 0.0)
    rows = [row for row in range(30) if row % 3]
    for row in rows:
        probabilities = torch.softmax(logits[row], 0).tolist()
        action, advantage = int(batch.actions[row]), float(batch.advantages[row])
        ratio = probabilities[action] / math.exp(float(batch.log_probs[row]))
        sums["policy_loss"] -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        sums["value_loss"] += 0.5 * (float(values[row]) - float(batch.returns[row])) ** 2
        sums["entropy"] -= sum(p * math.log(p) for p in probabilities)
        sums["approx_kl"] += ratio - 1 - math.log(ratio)
        sums["clip_fraction"] += abs(ratio - 1) > 0.2
    means = {name: total / len(rows) for name, total in sums.items()}
    assert 0 < means["clip_fraction"] < 1
    torch.testing.assert_close(dict(zip(METRICS, losses.tolist(), strict=True)), means)
    expected = means["policy_loss"] + 0.7 * means["value_loss"] - 0.03 * means["entropy"]
    torch.testing.assert_close(float(loss.detach()), expected)


def test_restart_rows_teach_nothing():
    policy, batch = sample(30)
    restarts = batch.weights == 0
    before = gradients(policy, batch)
    for column in (batch.observations, batch.advantages, batch.returns, batch.log_probs):
        column[restarts] = 17.0
    torch.testing.assert_close(gradients(policy, batch), before, rtol=0, atol=0)


def test_gradients_averaged_over_ranks_and_minibatches_are_those_of_one_big_batch():
    """Also where ranks and minibatches hold different numbers of valid rows."""
    policy, batch = sample(32)
    valid = batch.weights > 0
    weights = row_weights(valid, valid.sum(), world_size=2, num_minibatches=4)
    parts = list(Shuffler.cut(replace(batch, weights=weights.double()), 8))
    assert len({int((part.weights > 0).sum()) for part in parts}) > 1
    averaged = [
        torch.stack(list(of_parts)).mean(0) for of_parts in zip(*(gradients(policy, p) for p in parts), strict=True)
    ]
    torch.testing.assert_close(averaged, gradients(policy, batch))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sums_are_in_full_precision_under_autocast(precision: Any):
    settings = replace(SETTINGS, precision=precision)
    torch.manual_seed(0)
    policy = make_policy(settings, OBSERVATIONS, spaces.Discrete(3))
    _, batch = sample(300)
    batch = batch.map(lambda column: column.float() if column.is_floating_point() else column)
    batch = replace(batch, returns=300 + batch.returns)  # whose squares fp16 cannot hold
    loss, losses = loss_of(policy, batch, settings)
    assert (loss.dtype, losses.dtype) == (torch.float32, torch.float32)
    expected, _ = loss_of(policy, batch, replace(settings, precision="fp32"))
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)


def metrics_of(init_scale: float | None = None, **changes: Any) -> dict[str, float]:
    """Of one update of four minibatches a pass."""
    settings = Settings(num_envs=2, num_steps=16, num_minibatches=4, **changes)
    with group_of_one(), make_environments(settings, rank=0) as environments:
        ppo = PPO(settings, [environments], torch.device("cpu"))
        if init_scale is not None:
            ppo.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, backoff_factor=2.0**-120)
        return ppo.learn(ppo.collect())


def test_a_step_that_was_refused_is_not_counted():
    """The second minibatch is over any limit of 1e-12, so the first step is the only one, and what is logged is its."""
    metrics = metrics_of(num_epochs=3, target_kl=1e-12)
    assert metrics["optimizer_steps"] == 1
    assert metrics["approx_kl"] < 1e-12
    assert metrics["grad_norm"] > 0


def test_a_step_that_the_scaler_refuses_is_not_counted():
    metrics = metrics_of(2.0**127, num_epochs=1, precision="fp16")
    assert metrics["optimizer_steps"] == 3
    assert math.isfinite(metrics["grad_norm"])
