"""Minibatches hold every row once, and whole."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fastsync.ppo.batches import Batch, Shuffler
from fastsync.ppo.random_streams import RandomStreams

NUM_STEPS, NUM_ENVS = 8, 6


def made_batch() -> Batch:
    """Rows that say who they are: 100 * step + environment."""
    identity = 100.0 * torch.arange(NUM_STEPS).unsqueeze(1) + torch.arange(NUM_ENVS)
    return Batch(
        observations=identity.unsqueeze(-1).expand(-1, -1, 3),
        actions=identity.long(),
        log_probs=identity + 0.25,
        values=identity + 0.5,
        advantages=-identity,
        returns=2 * identity,
        weights=3 * identity,
    )


def shuffler(num_minibatches: int) -> Shuffler:
    return Shuffler(num_minibatches, RandomStreams(0, first_index=0, num_envs=NUM_ENVS, device=torch.device("cpu")))


@pytest.mark.parametrize("num_minibatches", [1, 4, 3])
def test_every_row_comes_once_and_whole(num_minibatches: int):
    batch = made_batch()
    parts = list(shuffler(num_minibatches).minibatches(batch, 1))
    assert [len(part.actions) for part in parts] == [NUM_STEPS * NUM_ENVS // num_minibatches] * num_minibatches
    seen = torch.cat([part.actions for part in parts])
    assert torch.equal(seen, batch.actions.flatten()) == (num_minibatches == 1)  # a single one needs no chance
    assert sorted(seen.tolist()) == sorted(batch.actions.flatten().tolist())
    for part in parts:
        identity = part.actions.float()
        assert torch.equal(part.observations, identity.unsqueeze(1).expand(-1, 3))
        columns = [part.log_probs, part.values, part.advantages, part.returns, part.weights]
        assert all(map(torch.equal, columns, [identity + 0.25, identity + 0.5, -identity, 2 * identity, 3 * identity]))


def test_every_pair_of_rows_may_meet_in_a_minibatch():
    """Also where a minibatch is smaller than a step of all environments."""
    shuffled = shuffler(16)
    batch = made_batch()
    met = {tuple(sorted(part.actions.remainder(100).tolist())) for part in shuffled.minibatches(batch, 40)}
    assert {pair for trio in met for pair in combinations(trio, 2) if len(trio) == 3} >= set(combinations(range(6), 2))
