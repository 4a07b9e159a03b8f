"""Tells how sure a median is: intervals by the bootstrap, and the band in which a repetition's median is expected.

A sample must be a repetition of its own. Steps of one launch are alike (the same cores, the same connections), so where
there are several launches, ``replicates`` takes each launch as one sample: its median.
"""

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 0
"""The same samples always give the same interval."""
SURE_FROM = 6
"""Samples from which a median's interval can hold its 95 %: the whole range of n samples misses the median with a
probability of 2^(1-n), whatever their distribution."""
RATIO_HOLDS = {2: 0.66, 3: 0.90, 4: 0.93, 5: 0.97, 6: 0.96, 10: 0.96}
"""How often an interval of 95 % held the true ratio of two medians of as many samples each: of 5,000 simulated cases,
lognormal with σ = 0.05, 1,000 resamples."""
SAMPLES_ARE_LAUNCHES = ("ppo",)
"""Benchmarks of which each sample is a run of new processes. In a row of any other they are steps of one launch."""


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bounds the median, whatever the distribution.

    From the k-th smallest sample to the k-th largest, with the largest k that misses the median with a probability of
    1 - ``confidence`` at most (W. Conover, Practical Nonparametric Statistics, section 3.2). Too few samples allow
    none: then it is the whole range, which holds the median with a probability of 1 - 2^(1-n), 75 % for three. One
    sample tells nothing, so its interval has no end; without samples there is no median, and both ends are nan.
    """
    from scipy.stats import binom  # not needed for --help

    number = len(samples)
    if number < 2:
        return (-math.inf, math.inf) if samples else (math.nan, math.nan)
    kth = max(1, int(binom.ppf((1 - confidence) / 2, number, 0.5)))
    ordered = sorted(samples)
    return ordered[kth - 1], ordered[-kth]


def range_holds_median(number: int) -> float:
    """The probability with which the range of so many samples holds the median of their distribution."""
    return 1 - 0.5 ** (number - 1)


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """The ratio of two medians, and between which values it lies.

    The percentile bootstrap (B. Efron, R. Tibshirani, An Introduction to the Bootstrap, chapter 13); the samples are
    not paired. Its confidence is nominal: for as many samples on either side as RATIO_HOLDS names, that is how often
    it held the true ratio. As for ``median_interval``, one sample on either side tells nothing about how sure the
    ratio is, and without samples there is none.
    """
    if not numerator or not denominator:
        return math.nan, math.nan, math.nan
    ratio = float(np.median(numerator) / np.median(denominator))
    if min(len(numerator), len(denominator)) < 2:
        return ratio, -math.inf, math.inf
    return ratio, *_interval((numerator, denominator), confidence)


def noise_band(samples: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Bounds how far a repetition's median lies from this one by chance alone, as a part of it.

    The other median is as unsure as this one, so it is how far apart the medians of two draws from these samples lie,
    on the wider side. Infinite for one sample, nan without any.
    """
    _, low, high = ratio_interval(samples, samples, confidence)
    return max(1 - low, high - 1)


def replicates(launches: Sequence[Sequence[float]]) -> list[float]:
    """Returns independent samples: the launches' medians, or the samples of the only launch there is."""
    launches = [samples for samples in launches if len(samples)]
    if len(launches) == 1:
        return list(launches[0])
    return [float(np.median(samples)) for samples in launches]


def _interval(data: tuple[Sequence[float], ...], confidence: float) -> tuple[float, float]:
    from scipy.stats import bootstrap

    result = bootstrap(
        data,
        _ratio_of_medians,
        n_resamples=max(RESAMPLES, round(20 / (1 - confidence))),  # ten beyond each end, or the ends would be chance
        batch=500,  # 500 × samples in memory at once
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _ratio_of_medians(numerator: np.ndarray, denominator: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(numerator, axis=axis) / np.median(denominator, axis=axis)
