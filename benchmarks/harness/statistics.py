"""Tells how sure a figure is: medians by order statistics, ratios by the bootstrap, and times until something arrives.

A sample must be a repetition of its own. Steps of one launch are alike (the same cores, the same connections), so where
there are several launches, ``replicates`` takes each launch as one sample: its median.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 0
"""The same samples always give the same interval."""
SURE_FROM = 6
"""Samples from which a median's interval can hold its 95 %: the whole range of n samples misses the median with a
probability of 2^(1-n), whatever their distribution."""
RATIO_HOLDS = {2: 0.66, 3: 0.90, 4: 0.93, 5: 0.97, 6: 0.96}
"""How often an interval of 95 % held the true ratio of two medians of as many samples each: of 5,000 simulated cases,
lognormal with σ = 0.05, 1,000 resamples."""


class Interval(NamedTuple):
    """A value, and between which ends the truth lies. One sample says nothing of them, so they are infinite."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


UNKNOWN = Interval(math.nan, math.nan, math.nan)
"""Without samples."""


def median_interval(samples: Sequence[float]) -> Interval:
    """The median and its bounds, whatever the distribution.

    From the k-th smallest sample to the k-th largest, with the largest k that misses the median with a probability of
    1 - CONFIDENCE at most (W. Conover, Practical Nonparametric Statistics, section 3.2). Too few samples allow
    none: then it is the whole range, which holds the median with a probability of 1 - 2^(1-n), 75 % for three.
    """
    from scipy.stats import binom  # slow to import, and ranks do without

    if not samples:
        return UNKNOWN
    middle, number = float(np.median(samples)), len(samples)
    if number == 1:
        return Interval(middle, -math.inf, math.inf)
    kth = max(1, int(binom.ppf((1 - CONFIDENCE) / 2, number, 0.5)))
    ordered = sorted(samples)
    return Interval(middle, ordered[kth - 1], ordered[-kth])


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The ratio of two medians, and between which values it lies.

    The percentile bootstrap (B. Efron, R. Tibshirani, An Introduction to the Bootstrap, chapter 13); the samples are
    not paired. Its confidence is nominal: for as many samples on either side as RATIO_HOLDS names, that is how often
    it held the true ratio.
    """
    from scipy.stats import bootstrap

    if not numerator or not denominator:
        return UNKNOWN
    ratio = float(np.median(numerator) / np.median(denominator))
    if min(len(numerator), len(denominator)) < 2:
        return Interval(ratio, -math.inf, math.inf)
    found = bootstrap(
        (numerator, denominator),
        lambda above, below, axis: np.median(above, axis=axis) / np.median(below, axis=axis),
        n_resamples=RESAMPLES,
        batch=500,  # 500 × samples in memory at once
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Interval(ratio, float(found.low), float(found.high))


class Time(NamedTuple):
    """How long a training took until it arrived; or, if it has not, how long it was waited for."""

    seconds: float
    arrived: bool


def median_time(times: Sequence[Time]) -> Interval:
    """The median time by the estimator of Kaplan and Meier, and where its interval (log-log) crosses one half.

    A training that has not arrived is censored: it takes longer than it was waited for, and nobody knows how much. So
    an end may be infinite, which means that it is not known. So may the median, if half of them have not arrived.
    """
    from scipy.stats import ecdf

    if not times:
        return UNKNOWN
    survival = ecdf(_censored(times)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # at 0 and 1 there is no log of a log
        bounds = survival.confidence_interval(CONFIDENCE, method="log-log")
    places, shares = survival.quantiles, survival.probabilities
    lower, upper = (np.where(np.isnan(each.probabilities), shares, each.probabilities) for each in bounds)

    def first(holds: np.ndarray) -> float:
        return float(places[holds][0]) if holds.any() else math.inf

    value = (first(shares <= 0.5) + first(shares < 0.5)) / 2  # as a median of an even number of samples
    return Interval(value, first(lower <= 0.5), first(upper <= 0.5))


def paired_ratio(pairs: Sequence[tuple[Time, Time]]) -> Interval:
    """The median over pairs of the first time divided by the second, and its bounds by order statistics.

    Trainings that took turns make pairs, so what slows down both does not count. If one of a pair has not arrived, its
    ratio is more, or less, than that of what was waited for. It then counts as the largest, or the least. An end that
    falls on such a pair is not known, and infinite. A pair of which neither has arrived says nothing.
    """
    extremes = {(False, True): math.inf, (True, False): -math.inf}
    return median_interval(
        [extremes.get((a.arrived, b.arrived), a.seconds / b.seconds) for a, b in pairs if a.arrived or b.arrived]
    )


def probability_of_sooner(ours: Sequence[Time], theirs: Sequence[Time]) -> Interval:
    """How probable it is that one of ``ours`` arrives before one of ``theirs``, with its percentile bootstrap interval.

    The probability of improvement (R. Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical
    Precipice, NeurIPS 2021, section 4.3, https://arxiv.org/abs/2108.13264): the U of Mann and Whitney, divided by the
    number of pairs. Two that have not arrived are a tie.
    """
    from scipy.stats import bootstrap

    if not ours or not theirs:
        return UNKNOWN
    ends = [np.asarray([time.seconds if time.arrived else math.inf for time in side]) for side in (ours, theirs)]

    def share(mine: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
        del axis
        pairs = mine[..., :, None], other[..., None, :]
        return (np.less(*pairs) + 0.5 * np.equal(*pairs)).mean((-2, -1))

    value = float(share(*ends))
    if min(map(len, ends)) < 2:
        return Interval(value, -math.inf, math.inf)
    found = bootstrap(
        ends, share, n_resamples=RESAMPLES, batch=500, vectorized=True, confidence_level=CONFIDENCE,
        method="percentile", rng=np.random.default_rng(SEED),
    ).confidence_interval  # fmt: skip
    return Interval(value, float(found.low), float(found.high))


def log_rank(ours: Sequence[Time], theirs: Sequence[Time]) -> float:
    """The p-value of the log-rank test, whose hypothesis is that both take equally long."""
    from scipy.stats import logrank

    if not any(time.arrived for time in (*ours, *theirs)):
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all are equal, nothing differs from nothing
        return float(logrank(_censored(ours), _censored(theirs)).pvalue)


def _censored(times: Sequence[Time]) -> Any:
    from scipy.stats import CensoredData

    return CensoredData.right_censored([time.seconds for time in times], [not time.arrived for time in times])


def replicates(launches: Sequence[Sequence[float]]) -> list[float]:
    """Returns independent samples: the launches' medians, or the samples of the only launch there is."""
    launches = [samples for samples in launches if len(samples)]
    if len(launches) == 1:
        return list(launches[0])
    return [float(np.median(samples)) for samples in launches]
