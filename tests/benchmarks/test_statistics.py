"""Intervals of medians and of interquartile means, against answers that are known."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from scipy.stats import trim_mean

from benchmarks.harness.statistics import (
    RATIO_HOLDS,
    SURE_FROM,
    interquartile_mean,
    interquartile_mean_interval,
    interquartile_ratio_interval,
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


def plain_interquartile_mean(samples: list[float]) -> float:
    ordered = sorted(samples)
    for _ in range(len(samples) // 4):
        ordered = ordered[1:-1]
    return sum(ordered) / len(ordered)


@pytest.mark.parametrize("number", range(1, 14))
def test_interquartile_mean_is_that_of_scipy(number: int):
    samples = np.random.default_rng(number).lognormal(size=number).tolist()
    assert interquartile_mean(samples) == pytest.approx(plain_interquartile_mean(samples))
    assert interquartile_mean(samples) == pytest.approx(trim_mean(samples, 0.25))  # as rliable has it


def test_runs_that_have_not_arrived_change_nothing_up_to_a_quarter_of_them():
    samples = [float(number) for number in range(10)]
    late = [*samples[:8], math.inf, math.inf]
    assert interquartile_mean(late) == interquartile_mean(samples) == 4.5
    assert interquartile_mean([*samples[:7], *[math.inf] * 3]) == math.inf
    value, low, high = interquartile_mean_interval(late)
    assert (value, high) == (4.5, math.inf)  # some resamples have three of them
    assert 1 < low < 4.5
    assert interquartile_mean_interval([math.inf] * 5) == (math.inf, math.inf, math.inf)


def test_interquartile_intervals_are_those_of_a_plain_bootstrap():
    rng = np.random.default_rng(5)
    slow, fast = rng.lognormal(3.0, 0.3, size=10).tolist(), rng.lognormal(2.0, 0.3, size=8).tolist()
    resampled = random.Random(1)

    def percentiles(values: list[float]) -> tuple[float, float]:
        low, *_, high = statistics.quantiles(values, n=40)
        return low, high

    def resample(samples: list[float]) -> float:
        return plain_interquartile_mean(resampled.choices(samples, k=len(samples)))

    means = percentiles([resample(slow) for _ in range(20_000)])
    value, *ends = interquartile_mean_interval(slow)
    assert value == pytest.approx(plain_interquartile_mean(slow))
    assert ends == pytest.approx(means, rel=0.02)
    ratios = percentiles([resample(slow) / resample(fast) for _ in range(20_000)])
    value, *ends = interquartile_ratio_interval(slow, fast)
    assert value == pytest.approx(plain_interquartile_mean(slow) / plain_interquartile_mean(fast))
    assert ends == pytest.approx(ratios, rel=0.02)


def test_interquartile_intervals_of_too_few_samples_are_not_known():
    assert interquartile_mean_interval([2.0]) == (2.0, -math.inf, math.inf)
    assert all(math.isnan(end) for end in interquartile_mean_interval([]))
    assert math.isnan(interquartile_mean([]))
    assert math.isnan(interquartile_ratio_interval([1.0, 2.0], []).value)
    assert math.isnan(interquartile_ratio_interval([math.inf] * 3, [math.inf] * 3).value)
    assert interquartile_ratio_interval([1.0] * 4, [math.inf] * 4) == (0.0, 0.0, 0.0)
