"""Intervals of medians, against answers that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.harness.statistics import (
    RATIO_HOLDS,
    SURE_FROM,
    median_interval,
    ratio_interval,
    replicates,
)


def test_without_samples_there_is_no_median_and_one_sample_says_nothing_of_its_noise():
    assert all(math.isnan(value) for value in median_interval([]))
    assert all(math.isnan(value) for value in (*ratio_interval([], [1.0]), *ratio_interval([1.0, 2.0], [])))
    assert median_interval([3.0]) == (3.0, -math.inf, math.inf)
    assert ratio_interval([3.0], [2.0, 2.0, 2.0]) == (1.5, -math.inf, math.inf)


@pytest.mark.parametrize("number", [2, 5])
def test_the_interval_of_few_samples_is_their_range(number: int):
    samples = [4.0, 1.0, 2.5, 3.0, 9.0][:number]
    assert median_interval(samples)[1:] == (min(samples), max(samples))
    assert 1 - 0.5 ** (number - 1) < 0.95 <= 1 - 0.5 ** (SURE_FROM - 1)  # how often the range holds the median


@pytest.mark.parametrize("number", [6, 9, 100])
def test_the_interval_is_that_of_the_binomial_distribution(number: int):
    """The k-th smallest of n lies above the median where fewer than k do not, as heads of n coins. For 100 samples the
    shortest interval of at least 95 % goes from the 40th to the 61st (W. Conover, Practical Nonparametric Statistics,
    section 3.2)."""
    _, low, high = median_interval([float(value) for value in np.random.default_rng(1).permutation(number) + 1])
    assert low + high == number + 1

    def missed(kth: int) -> float:
        return 2 * sum(math.comb(number, fewer) for fewer in range(kth)) / 2**number

    assert missed(int(low)) <= 0.05 < missed(int(low) + 1)
    if number == 100:
        assert (low, high) == (40, 61)


def test_how_often_the_ratio_of_few_samples_is_held_is_what_the_reports_say(monkeypatch: pytest.MonkeyPatch):
    """600 seeded runs, whose share is off by four standard errors in 1 of 16,000 cases."""
    monkeypatch.setattr("benchmarks.harness.statistics.RESAMPLES", 999)
    generator, runs, held = np.random.default_rng(3), 600, 0
    for above, below in generator.lognormal(0.0, 0.05, size=(runs, 2, 3)):
        _, low, high = ratio_interval(above.tolist(), below.tolist())
        held += low <= 1.0 <= high
    share = RATIO_HOLDS[3]
    assert abs(held / runs - share) < 4 * math.sqrt(share * (1 - share) / runs)


def test_launches_count_as_one_sample_each_where_there_are_several():
    assert replicates([[3.0, 1.0, 2.0]]) == [3.0, 1.0, 2.0]
    assert replicates([[3.0, 1.0, 2.0], [], [5.0, 4.0]]) == [2.0, 4.5]
