"""Intervals of medians, against answers that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.statistics import median_interval, noise_band, ratio_interval, replicates


def test_without_samples_there_is_no_median_and_one_sample_says_nothing_of_its_noise():
    assert all(math.isnan(end) for end in median_interval([]))
    assert math.isnan(noise_band([]))
    assert all(math.isnan(value) for value in (*ratio_interval([], [1.0]), *ratio_interval([1.0, 2.0], [])))
    assert median_interval([3.0]) == (-math.inf, math.inf)
    assert noise_band([3.0]) == math.inf
    assert ratio_interval([3.0], [2.0, 2.0, 2.0]) == (1.5, -math.inf, math.inf)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_the_interval_of_few_samples_is_their_range(number: int):
    samples = [4.0, 1.0, 2.5, 3.0, 9.0][:number]
    assert median_interval(samples) == (min(samples), max(samples))
    _, low, high = ratio_interval(samples, [2.0, 2.0])
    assert (low, high) == (min(samples) / 2, max(samples) / 2)


def test_what_never_varies_has_no_noise():
    assert median_interval([2.0] * 10) == (2.0, 2.0)
    assert noise_band([2.0] * 10) == 0.0
    assert ratio_interval([3.0] * 10, [2.0] * 10) == (1.5, 1.5, 1.5)


def test_the_interval_is_about_that_of_the_binomial_distribution():
    """The k-th smallest of n lies below the median with a probability that the binomial distribution gives.

    For 100 samples the exact interval of at least 95 % goes from the 40th to the 61st (W. Conover, Practical
    Nonparametric Statistics, section 3.2).
    """
    low, high = median_interval([float(value) for value in np.random.default_rng(1).permutation(100) + 1])
    assert low == pytest.approx(40, abs=1.5)
    assert high == pytest.approx(61, abs=1.5)


def test_samples_in_any_order_and_any_unit_have_the_same_noise():
    samples = np.random.default_rng(0).lognormal(size=30)
    assert median_interval(list(samples)) == median_interval(list(samples))
    low, high = median_interval(list(samples))
    assert median_interval(list(samples * 1024)) == (low * 1024, high * 1024)
    assert noise_band(list(samples * 1024)) == pytest.approx(noise_band(list(samples)))


def test_a_wider_confidence_gives_a_wider_interval():
    samples = list(np.random.default_rng(0).lognormal(size=50))
    narrow, wide = median_interval(samples, 0.8), median_interval(samples, 0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_intervals_hold_what_they_promise(monkeypatch: pytest.MonkeyPatch):
    """Of 200 seeded runs 95 % are to hold the truth. Fewer than 180 have a probability of 1 in 1000 if that is so."""
    monkeypatch.setattr("benchmarks.statistics.RESAMPLES", 1999)  # a fifth, for a quick test
    generator = np.random.default_rng(7)
    medians = ratios = bands = 0
    for _ in range(200):
        first, second = generator.lognormal(0.0, 0.3, size=(2, 25)).tolist()
        low, high = median_interval(first)
        medians += low <= 1.0 <= high
        _, low, high = ratio_interval([3 * value for value in first], second)
        ratios += low <= 3.0 <= high
        bands += abs(np.median(second) / np.median(first) - 1) <= noise_band(first)
    assert min(medians, ratios, bands) >= 180


def test_launches_count_as_one_sample_each_where_there_are_several():
    assert replicates([]) == []
    assert replicates([[3.0, 1.0, 2.0]]) == [3.0, 1.0, 2.0]
    assert replicates([[3.0, 1.0, 2.0], [], [5.0, 4.0]]) == [2.0, 4.5]
