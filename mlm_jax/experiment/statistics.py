"""What seeds can say: intervals, tests, detectable differences, fitted optima.

Every number is exact or drawn from a fixed seed, so the same values give the same
statistics. A arms, R rates, S seeds, G groups, K other.

Tests and intervals flip signs: under the null hypothesis a paired difference is as
often positive as negative. No other shape of its distribution is assumed.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

ALPHA = 0.05
POWER = 0.8
MAX_EXACT = 16  # seeds up to which all flips are counted; beyond, RESAMPLES are drawn
RESAMPLES = 2**MAX_EXACT
MAX_SIMULATED = 10  # seeds; beyond, a t-test's power is that of the sign-flip test
BOOTSTRAPS = 1000
MIN_RATES = 4  # three points always lie on a parabola


class NoOptimumError(ValueError):
    """There is no interior minimum, with a sentence that says why."""


class Estimate(NamedTuple):
    """A mean over `n` seeds. `confidence` is what the interval really has: its ends are
    two of finitely many numbers. NaN where one seed allows no interval."""

    n: int
    mean: float
    low: float
    high: float
    confidence: float


class Optimum(NamedTuple):
    """The rate of the least fitted loss; the interval is NaN with one seed.

    The fit is `a + b x + c x^2` with x = logit(rate). `interior` is the share of the
    bootstrap's fits that have a minimum between the rates tried.
    """

    rate: float
    low: float
    high: float
    loss: float
    coefficients: tuple[float, float, float]
    interior: float


class Trend(NamedTuple):
    """How logit(best rate) changes when the model becomes ten times as large."""

    slope: float
    low: float
    high: float


def estimate(values_S, alpha=ALPHA):
    """Returns the mean, and the values that a sign-flip test of `alpha` cannot reject.

    Those lie between two of the means of all subsets of the values, and are exact for
    values that are symmetric about their centre (Hartigan 1969, "Using subsample values
    as typical values"). Where so few seeds cannot reject anything, the interval is the
    range of the values, with the lower confidence that it has.
    """
    values_S = np.asarray(values_S, float)
    n, mean = len(values_S), float(np.mean(values_S))
    if n < 2:
        return Estimate(n, mean, math.nan, math.nan, math.nan)
    low, high, confidence = _ends(subset_means(values_S), alpha)
    return Estimate(n, mean, low, high, confidence)


def subset_means(values_S):
    """Returns the means of all subsets but the empty one; beyond MAX_EXACT values, of
    as many random ones."""
    is_in_KxS = _subsets(len(values_S))[1:]
    return is_in_KxS @ values_S / is_in_KxS.sum(1)


@functools.cache
def _subsets(n):
    """Returns bool[K, n], the empty subset first, all or as many random ones."""
    if n <= MAX_EXACT:
        return (np.arange(2**n)[:, None] >> np.arange(n)) % 2 == 1
    is_in_KxS = np.random.default_rng(0).random((RESAMPLES, n)) < 0.5
    is_in_KxS[0] = False
    return is_in_KxS[(np.arange(RESAMPLES) == 0) | is_in_KxS.any(1)]


def _ends(means_K, alpha):
    """Returns (low, high, confidence) of the interval between two of the means."""
    total = len(means_K) + 1  # and the flip of no sign
    k = max(math.floor(alpha / 2 * total + 1e-9), 1)
    ordered_K = np.partition(means_K, [k - 1, len(means_K) - k])
    return float(ordered_K[k - 1]), float(ordered_K[-k]), 1 - 2 * k / total


def sign_flip_p(differences_S):
    """Returns the two-sided p of the sign-flip test, float[...] for [..., S]: exact up
    to MAX_EXACT seeds."""
    test = stats.permutation_test(
        (np.asarray(differences_S, float),),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        axis=-1,
        rng=np.random.default_rng(0),
    )
    return test.pvalue


def holm(p_values):
    """Returns the p-values adjusted for all of them being looked at (Holm 1979)."""
    p_K = np.asarray(p_values, float)
    order_K = np.argsort(p_K, kind="stable")
    adjusted_K = np.empty(len(p_K))
    factors_K = len(p_K) - np.arange(len(p_K))
    adjusted_K[order_K] = np.maximum.accumulate(factors_K * p_K[order_K])
    return np.minimum(adjusted_K, 1)


def joint_p(differences_AxS):
    """Returns p of each arm, adjusted for all arms being looked at, from flips of whole
    seeds; a seed that an arm lacks is NaN.

    An arm is held against the largest of all arms in each flip, and once it is found,
    the others against the rest of them (Westfall & Young 1993). Beside Holm's, this
    also assumes that the arms' differences are symmetric jointly, as those of normal
    noise are; it counts arms that move together once, and its least value does not
    grow with the number of arms.
    """
    differences_AxS = np.nan_to_num(np.asarray(differences_AxS, float))
    scale_A = np.sqrt((differences_AxS**2).sum(1))
    signs_KxS = 1 - 2 * _subsets(differences_AxS.shape[1])
    sizes_KxA = np.abs(signs_KxS @ differences_AxS.T) / np.where(scale_A, scale_A, 1)
    order_A = np.argsort(-sizes_KxA[0], kind="stable")
    ordered_KxA = sizes_KxA[:, order_A]
    largest_KxA = np.maximum.accumulate(ordered_KxA[:, ::-1], axis=1)[:, ::-1]
    p_A = np.empty(len(order_A))
    reached_A = (largest_KxA >= ordered_KxA[0] - 1e-9).mean(0)
    p_A[order_A] = np.maximum.accumulate(reached_A)
    return p_A


def least_p(num_seeds, num_comparisons=1):
    """Returns the smallest p that any differences can reach, adjusted by Holm."""
    flips = 2**num_seeds if num_seeds <= MAX_EXACT else RESAMPLES + 1
    return min(1, num_comparisons * 2 / flips)


def seeds_needed(num_comparisons=1, alpha=ALPHA):
    """Returns the least number of seeds with which an adjusted p can reach `alpha`."""
    return next(n for n in range(1, 64) if least_p(n, num_comparisons) <= alpha)


def power_sentence(num_seeds, num_comparisons):
    """Says what p can be reached at all."""
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)}"
    least, adjusted = least_p(num_seeds), least_p(num_seeds, num_comparisons)
    if least > ALPHA:
        return (
            f"{seeds} cannot reach p < {ALPHA:g} (least: {least:.2g}); "
            f"{seeds_needed()} can."
        )
    if adjusted > ALPHA:
        return (
            f"{seeds} can reach p < {ALPHA:g} (least: {least:.2g}), but not after "
            f"Holm's adjustment for {num_comparisons} comparisons (least: "
            f"{adjusted:.2g}); {seeds_needed(num_comparisons)} can."
        )
    return f"{seeds} can reach p < {ALPHA:g} (least: {adjusted:.2g})."


@functools.cache
def detectable_effect(num_seeds, alpha=ALPHA):
    """Returns the difference that the test finds with a probability of POWER, in
    standard deviations of normal paired differences; inf where none can be found.

    The test finds it when the interval lies beyond zero; the interval moves with the
    difference. So it is a quantile of how far the interval of no difference reaches.
    """
    if least_p(num_seeds) > alpha:
        return math.inf
    if num_seeds > MAX_SIMULATED:
        return _detectable_by_t(num_seeds, alpha)
    draws_KxS = np.random.default_rng(0).standard_normal((4000, num_seeds))
    reach_K = [-_ends(subset_means(draws_S), alpha)[0] for draws_S in draws_KxS]
    return float(np.quantile(reach_K, POWER))


def _detectable_by_t(num_seeds, alpha):
    df, scale = num_seeds - 1, math.sqrt(num_seeds)
    limit = stats.t.ppf(1 - alpha / 2, df)

    def surplus(effect):
        return stats.nct.sf(limit, df, effect * scale) - POWER

    return float(optimize.brentq(surplus, 0, 10))


def detectable_difference(differences_S, alpha=ALPHA):
    """The same in the unit of the differences, from their standard deviation."""
    if len(differences_S) < 2:
        return math.inf
    effect = detectable_effect(len(differences_S), alpha)
    return float(np.std(differences_S, ddof=1)) * effect


def fit_optimum(rates_R, losses_RxS):
    """Returns the Optimum of a parabola through the mean losses against logit(rate).

    The interval resamples seeds, each with its losses at all rates. Raises
    NoOptimumError, with a sentence, where no minimum lies between the rates.
    """
    rates_R, losses_RxS = np.asarray(rates_R, float), np.asarray(losses_RxS, float)
    if len(rates_R) < MIN_RATES:
        raise NoOptimumError(
            f"A fit needs {MIN_RATES} rates or more; there are {len(rates_R)}."
        )
    if (rates_R >= 1).any():
        raise NoOptimumError("A rate of 1 has no logit.")
    x_R = special.logit(rates_R)
    fits_3xS = _fit(x_R, losses_RxS)
    fit = fits_3xS.mean(1)
    place, is_interior = _vertex(x_R, fit)
    if not is_interior:
        raise NoOptimumError(
            f"No minimum between the rates tried: the fitted loss is least at "
            f"{special.expit(place):.3g}, where they end."
        )
    error, places_K = _bootstrap(
        losses_RxS.shape[1],
        lambda seeds: _vertex(x_R, fits_3xS[:, seeds].mean(-1))[0],
    )
    low, high = np.clip([place - error, place + error], x_R.min(), x_R.max())
    is_interior_K = (places_K > x_R.min()) & (places_K < x_R.max())
    return Optimum(
        rate=float(special.expit(place)),
        low=float(special.expit(low)),
        high=float(special.expit(high)),
        loss=float(np.polynomial.polynomial.polyval(place, fit)),
        coefficients=(float(fit[0]), float(fit[1]), float(fit[2])),
        interior=float(is_interior_K.mean()) if len(places_K) else math.nan,
    )


def fit_trend(sizes_G, rates_G, losses_G):
    """Returns the Trend of the best rate over groups of models, which share seeds.

    `rates_G` are float[R], `losses_G` float[R, S] for each group.
    Raises NoOptimumError where there are not two sizes.
    """
    if len(set(sizes_G)) < 2:
        raise NoOptimumError(
            f"A trend needs the optimum of two sizes; there is {len(set(sizes_G))}."
        )
    size_G = np.log10(np.asarray(sizes_G, float))
    logit_G = [special.logit(rates_R) for rates_R in rates_G]
    fits_G = [_fit(x_R, losses) for x_R, losses in zip(logit_G, losses_G, strict=True)]

    def slopes(seeds_KxS):
        places_GxK = [
            _vertex(x_R, fits_3xS[:, seeds_KxS].mean(-1))[0]
            for x_R, fits_3xS in zip(logit_G, fits_G, strict=True)
        ]
        return np.polynomial.polynomial.polyfit(size_G, np.stack(places_GxK), 1)[1]

    num_seeds = losses_G[0].shape[1]
    slope = float(slopes(np.arange(num_seeds)[None])[0])
    error, _ = _bootstrap(num_seeds, slopes)
    return Trend(slope, slope - error, slope + error)


def _fit(x_R, losses_RxS):
    """Returns float[3, S], a parabola for each seed. Fits are linear in the losses: the
    mean of the seeds' is that of their mean."""
    return np.polynomial.polynomial.polyfit(x_R, losses_RxS, 2)


def _vertex(x_R, fit):
    """Returns (x, is interior) of the least value of `fit`, float[3, ...], between the
    ends of `x_R`."""
    _, b, c = fit
    with np.errstate(divide="ignore", invalid="ignore"):
        x = -b / (2 * c)
    low, high = x_R.min(), x_R.max()
    is_interior = (c > 0) & (x > low) & (x < high)
    is_rising = b * (high - low) + c * (high**2 - low**2) > 0
    end = np.where(is_rising, low, high)
    return np.where(is_interior, x, end), is_interior


def _bootstrap(num_seeds, statistic):
    """Returns (half an interval's width, draws) of `statistic`, from int[K, S] to
    float[K], over choices of seeds with replacement.

    Percentiles of few seeds lie too close to each other; so the bootstrap gives the
    standard error, corrected for its divisor, and Student's t the width.
    """
    if num_seeds < 2:
        return math.nan, np.empty(0)
    found = stats.bootstrap(
        (np.arange(num_seeds),),
        lambda seeds, axis: statistic(np.atleast_2d(seeds).astype(int)),
        vectorized=True,
        n_resamples=BOOTSTRAPS,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    error = found.standard_error * math.sqrt(num_seeds / (num_seeds - 1))
    width = float(stats.t.ppf(1 - ALPHA / 2, num_seeds - 1) * error)
    return width, found.bootstrap_distribution
