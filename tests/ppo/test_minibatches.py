"""Minibatches hold every row once, and whole. Random numbers are those of SplitMix64, and evenly spread."""

from __future__ import annotations

import pytest
import torch

from fastsync.ppo.ppo import Batch, Shuffler
from fastsync.ppo.random_streams import RandomStreams, _mix

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
    return Shuffler(num_minibatches, [RandomStreams(0, first_index=0, num_envs=NUM_ENVS, device=torch.device("cpu"))])


@pytest.mark.parametrize("num_minibatches", [1, 4, 3])
def test_every_row_comes_once_and_whole(num_minibatches: int):
    batch = made_batch()
    parts = [part for (part,) in shuffler(num_minibatches).minibatches([batch], 1)]
    assert [len(part.actions) for part in parts] == [NUM_STEPS * NUM_ENVS // num_minibatches] * num_minibatches
    seen = torch.cat([part.actions for part in parts])
    assert torch.equal(seen, batch.actions.flatten()) == (num_minibatches == 1)  # a single one needs no chance
    assert sorted(seen.tolist()) == sorted(batch.actions.flatten().tolist())
    for part in parts:
        identity = part.actions.float()
        assert torch.equal(part.observations, identity.unsqueeze(1).expand(-1, 3))
        columns = [part.log_probs, part.values, part.advantages, part.returns, part.weights]
        assert all(map(torch.equal, columns, [identity + 0.25, identity + 0.5, -identity, 2 * identity, 3 * identity]))


MASK = 2**64 - 1


def streams(seed: int = 0, num_envs: int = 4) -> RandomStreams:
    return RandomStreams(seed, first_index=0, num_envs=num_envs, device=torch.device("cpu"))


def test_mixing_is_splitmix64s():
    def plain(bits: int) -> int:
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
        return bits ^ (bits >> 31)

    inputs = torch.randint(-(2**62), 2**62, (100,), generator=torch.Generator().manual_seed(0)) * 2
    assert [value & MASK for value in _mix(inputs).tolist()] == [plain(value & MASK) for value in inputs.tolist()]
    # The first number of the generator with seed 0, as published with it.
    assert int(_mix(torch.tensor(0x9E3779B97F4A7C15 - 2**64))) & MASK == 0xE220A8397B1DCDAF


def test_uniform_numbers_are_uniform():
    numbers = streams(num_envs=20).uniform(500, 10, torch.float32)
    assert 0 < numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    # Chi-squared with 99 degrees of freedom: five standard deviations about its mean.
    statistic = ((counts - 1000).square() / 1000).sum()
    assert abs(statistic - 99) < 5 * (2 * 99) ** 0.5
    # Neighbours in time, in the number of the environment, and in the column know nothing of each other.
    centred = numbers - 0.5
    for dim in range(3):
        size = numbers.shape[dim] - 1
        products = centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)
        assert abs(products.mean()) < 5 / 12 / products.numel() ** 0.5
