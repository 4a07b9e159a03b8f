"""Tells how sure a figure is: a median by order statistics, ratios and interquartile means by the bootstrap.

A sample must be a repetition of its own. Steps of one launch are alike (the same cores, the same connections), so where
there are several launches, ``replicates`` takes each launch as one sample: its median.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


def interquartile_mean(samples: Sequence[float]) -> float:
    """The mean without the lowest quarter of the samples and without the highest, each rounded down.

    A sample may be infinite, such as the time of a run that has not arrived. It counts as one of the highest, so that
    as many as a quarter of the samples change nothing but which ones are left out; with more the result is infinite.
    """
    return float(_interquartile_means(np.asarray(samples, np.float64))) if len(samples) else math.nan


def _interquartile_means(samples: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    number = samples.shape[-1]
    return np.sort(samples, axis=-1)[..., number // 4 : number - number // 4].mean(axis=-1)


def interquartile_mean_interval(samples: Sequence[float]) -> Interval:
    """The interquartile mean and its percentile bootstrap interval (R. Agarwal et al., Deep Reinforcement Learning at
    the Edge of the Statistical Precipice, NeurIPS 2021, sections 4.1 and 4.3, https://arxiv.org/abs/2108.13264).

    The samples are the runs of one task. The bootstrap is stratified: runs of other tasks or methods are not mixed in.
    """
    return _bootstrapped([samples], lambda means: means)


def interquartile_ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The ratio of two interquartile means, and its interval as in ``interquartile_mean_interval``.

    Each side is resampled within itself. A ratio of two infinite means is nan: it may be anything.
    """
    return _bootstrapped([numerator, denominator], np.divide)


def _bootstrapped(strata: Sequence[Sequence[float]], combine: Callable[..., np.ndarray]) -> Interval:
    """What ``combine`` makes of the interquartile means of the strata, and its interval."""
    if not all(strata):
        return UNKNOWN
    rng, arrays = np.random.default_rng(SEED), [np.asarray(samples, np.float64) for samples in strata]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(combine(*map(_interquartile_means, arrays)))
        if min(map(len, arrays)) < 2:
            return Interval(value, -math.inf, math.inf)
        drawn = [samples[rng.integers(len(samples), size=(RESAMPLES, len(samples)))] for samples in arrays]
        found = combine(*map(_interquartile_means, drawn))
    # What is not known may be anything. The ends are values that were found: there is no middle between a finite one
    # and an infinite one.
    lowest, highest = (np.sort(np.where(np.isnan(found), end, found)) for end in (-math.inf, math.inf))
    left_out = round((1 - CONFIDENCE) / 2 * (RESAMPLES - 1))
    return Interval(value, float(lowest[left_out]), float(highest[-1 - left_out]))


def replicates(launches: Sequence[Sequence[float]]) -> list[float]:
    """Returns independent samples: the launches' medians, or the samples of the only launch there is."""
    launches = [samples for samples in launches if len(samples)]
    if len(launches) == 1:
        return list(launches[0])
    return [float(np.median(samples)) for samples in launches]
