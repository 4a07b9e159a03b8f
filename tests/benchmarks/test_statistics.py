"""Intervals of medians and of ratios, and times of what may not arrive, against answers that are known."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from benchmarks.harness.statistics import (
    RATIO_HOLDS,
    SURE_FROM,
    Time,
    log_rank,
    median_interval,
    median_time,
    paired_ratio,
    probability_of_sooner,
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


def arriving(*seconds: float) -> list[Time]:
    return [Time(each, arrived=True) for each in seconds]


def test_the_median_time_is_the_median_where_all_arrive():
    for number in (5, 6, 10):
        samples = np.random.default_rng(number).lognormal(size=number).tolist()
        value, low, high = median_time(arriving(*samples))
        assert value == pytest.approx(statistics.median(samples))
        assert min(samples) <= low < value < high <= max(samples)
    assert all(math.isnan(end) for end in median_time([]))


def test_trainings_that_do_not_arrive_are_censored():
    """The numbers are Kaplan's and Meier's: of 4, one leaves at 2 unseen; 3 are left, of which one arrives at 3."""
    times = [*arriving(1.0), Time(2.0, arrived=False), *arriving(3.0, 4.0)]
    assert median_time(times).value == 3.0  # 3/4 after 1, 3/4 · 1/2 after 3
    late = [*arriving(*range(1, 9)), Time(100.0, arrived=False), Time(200.0, arrived=False)]
    value, low, high = median_time(late)
    assert (value, high) == (5.5, 8.0)  # what was waited for does not matter
    assert 1 <= low < value
    few = median_time([*arriving(1.0, 2.0), *[Time(9.0, arrived=False)] * 8])
    assert (few.value, few.high) == (math.inf, math.inf)


def test_ratios_of_pairs_leave_out_what_slows_both():
    rng = np.random.default_rng(2)
    slowed = rng.lognormal(0.0, 2.0, size=9)
    pairs = [(Time(2.0 * each, arrived=True), Time(each, arrived=True)) for each in slowed.tolist()]
    assert paired_ratio(pairs) == (2.0, 2.0, 2.0)
    late = Time(50.0, arrived=False)
    one_late = [*pairs[:8], (pairs[8][0], late)]
    assert paired_ratio(one_late) == (2.0, 2.0, 2.0)  # one of nine is no end of the interval
    two_late = [*pairs[:7], (pairs[7][0], late), (late, pairs[8][1])]
    assert paired_ratio(two_late) == (2.0, 2.0, 2.0)
    assert paired_ratio([*pairs[:5], (pairs[5][0], late), *[(late, late)] * 4]) == (2.0, -math.inf, 2.0)
    assert math.isnan(paired_ratio([(late, late)] * 4).value)
    assert math.isnan(paired_ratio([]).value)


def test_probability_of_sooner_counts_pairs():
    ours, theirs = arriving(1.0, 2.0, 3.0), arriving(2.0, 4.0)
    value, low, high = probability_of_sooner(ours, theirs)
    assert value == pytest.approx((2 + 1.5 + 1) / 6)  # 1 before both, 2 before 4 and equal to 2, 3 before 4
    assert value == pytest.approx(1 - mannwhitneyu([1.0, 2.0, 3.0], [2.0, 4.0]).statistic / 6)
    assert 0 <= low <= value <= high <= 1
    never = [Time(1.0, arrived=False)] * 3
    assert probability_of_sooner(never, never).value == 0.5
    assert probability_of_sooner(arriving(*range(1, 5)), never).value == 1.0
    assert probability_of_sooner(arriving(1.0), theirs) == (1.0, -math.inf, math.inf)


def test_the_log_rank_test_tells_the_slow_from_the_fast():
    fast, slow = arriving(*range(1, 9)), arriving(*range(11, 19))
    assert log_rank(fast, fast) == pytest.approx(1.0)
    assert log_rank(fast, slow) < 1e-3
    assert log_rank(fast, [Time(9.0, arrived=False)] * 8) < 1e-3
    assert math.isnan(log_rank([Time(9.0, arrived=False)], [Time(9.0, arrived=False)]))
