"""Minibatches hold every row once, whole, and are the same however environments are spread over ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fastsync.ppo.batches import Batch, Shuffler
from fastsync.ppo.random_streams import RandomStreams

NUM_STEPS, NUM_ENVS = 8, 6


def batch_of(envs: slice) -> Batch:
    """Rows that say who they are: 100 * step + environment."""
    identity = 100.0 * torch.arange(NUM_STEPS).unsqueeze(1) + torch.arange(NUM_ENVS)[envs]
    return Batch(
        observations=identity.unsqueeze(-1).expand(-1, -1, 3),
        actions=identity.long(),
        log_probs=identity + 0.25,
        values=identity + 0.5,
        advantages=-identity,
        returns=2 * identity,
        weights=3 * identity,
    )


def shuffler(num_minibatches: int, *, rank: int = 0, world_size: int = 1) -> Shuffler:
    size = NUM_ENVS // world_size
    return Shuffler(
        num_minibatches, RandomStreams(0, first_index=rank * size, num_envs=size, device=torch.device("cpu"))
    )


@pytest.mark.parametrize("num_minibatches", [1, 4, 3])
def test_every_row_comes_once_and_whole(num_minibatches: int):
    batch = batch_of(slice(None))
    parts = list(shuffler(num_minibatches).minibatches(batch, 1))
    assert [len(part.actions) for part in parts] == [NUM_STEPS * NUM_ENVS // num_minibatches] * num_minibatches
    seen = torch.cat([part.actions for part in parts])
    assert torch.equal(seen, batch.actions.flatten()) == (num_minibatches == 1)  # a single one needs no chance
    assert sorted(seen.tolist()) == sorted(batch.actions.flatten().tolist())
    for part in parts:
        identity = part.actions.float()
        assert torch.equal(part.observations, identity.unsqueeze(1).expand(-1, 3))
        assert torch.equal(part.log_probs, identity + 0.25)
        assert torch.equal(part.values, identity + 0.5)
        assert torch.equal(part.advantages, -identity)
        assert torch.equal(part.returns, 2 * identity)
        assert torch.equal(part.weights, 3 * identity)


def test_each_pass_is_in_another_order():
    shuffled, batch = shuffler(2), batch_of(slice(None))
    orders = [part.actions for _ in range(2) for part in shuffled.minibatches(batch, 2)]
    assert len(orders) == 8
    assert not any(torch.equal(first, second) for first, second in combinations(orders, 2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_minibatches_do_not_depend_on_the_number_of_ranks(world_size: int):
    alone = shuffler(4)
    size = NUM_ENVS // world_size
    ranks = [shuffler(4, rank=rank, world_size=world_size) for rank in range(world_size)]
    together = zip(
        *(r.minibatches(batch_of(slice(i * size, (i + 1) * size)), 2) for i, r in enumerate(ranks)), strict=True
    )
    for whole, parts in zip(alone.minibatches(batch_of(slice(None)), 2), together, strict=True):
        assert len({len(part.actions) for part in parts}) == 1
        assert sorted(torch.cat([part.actions for part in parts]).tolist()) == sorted(whole.actions.tolist())


def test_every_pair_of_rows_may_meet_in_a_minibatch():
    """Also where a minibatch is smaller than a step of all environments."""
    shuffled = shuffler(16)
    batch = batch_of(slice(None))
    met = {tuple(sorted(part.actions.remainder(100).tolist())) for part in shuffled.minibatches(batch, 40)}
    assert {pair for trio in met for pair in combinations(trio, 2) if len(trio) == 3} >= set(combinations(range(6), 2))
