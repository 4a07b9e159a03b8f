"""Random numbers of environments: those of SplitMix64, and evenly spread."""

from __future__ import annotations

import torch

from fastsync.ppo.random_streams import RandomStreams, _mix

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


def test_no_two_draws_are_alike():
    drawn = [streams(seed).bits(50, 2) for seed in range(5)]
    again = streams()
    drawn += [again.bits(50, 2) for _ in range(3)][1:]
    assert torch.stack(drawn).unique().numel() == 7 * 50 * 4 * 2


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
