"""The loss against its definition row by row, and the weights that make ranks and minibatches count alike."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastsync.ppo.config import Settings
from fastsync.ppo.policy import ActorCritic
from fastsync.ppo.update import LOGGED, Batch, ppo_loss, row_weights

SETTINGS = Settings(ent_coef=0.03, vf_coef=0.7)


def sample(num_rows: int, *, seed: int = 0) -> tuple[ActorCritic, Batch]:
    """A policy, and rows whose probability ratios lie on both sides of the clipping range. A third is not valid."""
    torch.manual_seed(seed)
    policy = ActorCritic(4, 3, 16).double()
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100)
    valid = torch.arange(num_rows) % 3 != 0
    batch = Batch(
        observations=torch.randn(num_rows, 4, dtype=torch.float64),
        actions=torch.randint(3, (num_rows,)),
        log_probs=-torch.rand(num_rows, dtype=torch.float64) * 2,
        advantages=torch.randn(num_rows, dtype=torch.float64),
        returns=torch.randn(num_rows, dtype=torch.float64),
        weights=row_weights(valid, valid.sum(), world_size=1, num_minibatches=1).double(),
    )
    return policy, batch


def gradients(policy: nn.Module, batch: Batch) -> list[Tensor]:
    loss, _ = ppo_loss(policy, batch, SETTINGS)
    return list(torch.autograd.grad(loss, list(policy.parameters())))


def test_loss_is_the_mean_over_valid_rows():
    policy, batch = sample(30)
    loss, logged = ppo_loss(policy, batch, SETTINGS)
    with torch.no_grad():
        logits, values = policy(batch.observations)
    sums = dict.fromkeys(LOGGED[:-1], 0.0)
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
    torch.testing.assert_close(dict(zip(LOGGED, logged.tolist(), strict=False)), means)
    expected = means["policy_loss"] + 0.7 * means["value_loss"] - 0.03 * means["entropy"]
    torch.testing.assert_close(float(loss.detach()), expected)


def test_restart_rows_teach_nothing():
    policy, batch = sample(30)
    restarts = batch.weights == 0
    other = {}
    for name in ("observations", "advantages", "returns", "log_probs"):
        column = getattr(batch, name).clone()
        column[restarts] = 17.0
        other[name] = column
    for before, after in zip(gradients(policy, batch), gradients(policy, replace(batch, **other)), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_gradients_averaged_over_ranks_and_minibatches_are_those_of_one_big_batch():
    """Also where ranks and minibatches hold different numbers of valid rows."""
    policy, batch = sample(32)
    valid = batch.weights > 0
    weights = row_weights(valid, valid.sum(), world_size=2, num_minibatches=4)
    parts = replace(batch, weights=weights.double()).split(8)
    assert len({int((part.weights > 0).sum()) for part in parts}) > 1
    averaged = [
        torch.stack(list(of_parts)).mean(0) for of_parts in zip(*(gradients(policy, p) for p in parts), strict=True)
    ]
    torch.testing.assert_close(averaged, gradients(policy, batch))


def test_shuffling_keeps_rows_together():
    _, batch = sample(30)
    shuffled = batch.shuffled(torch.Generator().manual_seed(0))
    assert not torch.equal(shuffled.returns, batch.returns)

    def rows(batch: Batch) -> list[list[float]]:
        columns = [column.double().reshape(30, -1) for column in vars(batch).values()]
        return sorted(torch.cat(columns, dim=1).tolist())

    assert rows(shuffled) == rows(batch)
