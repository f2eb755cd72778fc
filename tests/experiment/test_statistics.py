"""Tests hold their level, intervals invert them, and what is planted is found."""

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from mlm_jax.experiment import statistics

RATES = np.array([0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8])
NUM_NULL = 2000
# Of a share of 5% among that many, three standard errors.
ERROR = 3 * math.sqrt(0.05 * 0.95 / NUM_NULL)


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def all_flips(values):
    """Returns |mean| under each choice of signs, the observed one first."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    return np.abs(signs @ values) / len(values)


@pytest.mark.parametrize("num_seeds", [2, 3, 6, 9])
def test_p_counts_the_flips_at_least_as_large(num_seeds):
    for values in draws(5, num_seeds) + 0.5:
        sizes = all_flips(values)
        expected = np.mean(sizes >= sizes[0] - 1e-12)
        assert statistics.sign_flip_p(values) == pytest.approx(expected)
        assert statistics.joint_p(values[None])[0] == pytest.approx(expected)


def test_p_is_scipys():
    values = draws(7) + 0.4
    expected = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert statistics.sign_flip_p(values) == expected.pvalue
    # Ranks of ±1 are all alike, so that Wilcoxon's test is the same one.
    signs = np.array([1.0, 1, 1, 1, 1, -1])
    expected = stats.binomtest(5, 6).pvalue
    assert statistics.sign_flip_p(signs) == pytest.approx(expected)


def test_p_of_many_seeds_is_near_students():
    values = draws(24) + 0.4
    expected = stats.ttest_1samp(values, 0).pvalue
    assert statistics.sign_flip_p(values) == pytest.approx(expected, abs=0.01)
    low, high = stats.t.interval(0.95, 23, values.mean(), stats.sem(values))
    found = statistics.estimate(values)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)
    assert found.confidence == pytest.approx(0.95, abs=1e-4)
    assert statistics.sign_flip_p(values) == statistics.sign_flip_p(values)


@pytest.mark.parametrize("num_seeds", [6, 7, 10])
def test_interval_holds_what_the_test_cannot_reject(num_seeds):
    values = draws(num_seeds, seed=3)
    found = statistics.estimate(values)
    for end, outwards in ((found.low, -1), (found.high, 1)):
        outside, inside = end + outwards * 1e-6, end - outwards * 1e-6
        assert statistics.sign_flip_p(values - outside) <= statistics.ALPHA
        assert statistics.sign_flip_p(values - inside) > statistics.ALPHA


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 6, 8])
def test_interval_has_the_confidence_that_it_claims(num_seeds):
    found = [statistics.estimate(values) for values in draws(NUM_NULL, num_seeds)]
    share = np.mean([e.low <= 0 <= e.high for e in found])
    claimed = found[0].confidence
    expected = {2: 1 / 2, 3: 3 / 4, 5: 15 / 16, 6: 31 / 32, 8: 1 - 12 / 256}
    assert claimed == expected[num_seeds]
    error = math.sqrt(claimed * (1 - claimed) / NUM_NULL)
    assert share == pytest.approx(claimed, abs=3 * error)


def test_one_seed_has_no_interval():
    found = statistics.estimate([4.2])
    assert found[:2] == (1, 4.2)
    assert all(math.isnan(value) for value in found[2:])


@pytest.mark.parametrize("num_seeds", [6, 8])
def test_null_experiments_are_rarely_found_positive(num_seeds):
    """One arm against the baseline, under normal and under heavy-tailed noise."""
    rng = np.random.default_rng(1)
    for losses in (
        rng.standard_normal((2, NUM_NULL, num_seeds)),
        rng.standard_t(2, (2, NUM_NULL, num_seeds)),
    ):
        share = np.mean(statistics.sign_flip_p(losses[1] - losses[0]) <= 0.05)
        assert 0.01 < share <= 0.05 + ERROR


def test_null_experiments_of_many_arms_are_rarely_found_positive():
    """Four arms against one baseline: any of them found is a false positive."""
    losses_AxKxS = draws(5, NUM_NULL, 8, seed=2) + draws(1, NUM_NULL, 8, seed=3)
    differences_KxAxS = (losses_AxKxS[1:] - losses_AxKxS[0]).swapaxes(0, 1)
    p_KxA = statistics.sign_flip_p(differences_KxAxS)
    assert np.mean(p_KxA.min(1) <= 0.05) > 0.1  # what adjusting is for
    found = {
        "holm": [statistics.holm(p_A).min() for p_A in p_KxA],
        "joint": [statistics.joint_p(d_AxS).min() for d_AxS in differences_KxAxS],
    }
    for name, least_K in found.items():
        share = np.mean(np.array(least_K) <= 0.05)
        assert 0.005 < share <= 0.05 + ERROR, name


def test_holm_by_hand():
    found = statistics.holm([0.01, 0.04, 0.03, 0.005])
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.9]).max() == 1


def test_joint_p_by_hand():
    """Against all flips, arm after arm; a missing seed counts for nothing."""
    differences = draws(3, 5, seed=5) + np.array([[1.5], [0.5], [0.0]])
    differences[2, 4] = math.nan
    signs = np.array(list(itertools.product((1, -1), repeat=5)))
    known = np.nan_to_num(differences)
    sizes = np.abs(signs @ known.T) / np.sqrt((known**2).sum(1))
    left, expected, least = list(np.argsort(-sizes[0])), np.empty(3), 0.0
    while left:
        largest = sizes[:, left].max(1)
        least = max(least, np.mean(largest >= sizes[0, left[0]] - 1e-12))
        expected[left.pop(0)] = least
    assert statistics.joint_p(differences) == pytest.approx(expected)


def test_joint_p_can_be_small_for_any_number_of_arms():
    differences = 1 + 0.1 * draws(20, 6)
    assert statistics.joint_p(differences) == pytest.approx(np.full(20, 2 / 64))
    p = [statistics.sign_flip_p(d) for d in differences]
    assert statistics.holm(p).min() == pytest.approx(20 * 2 / 64)


def test_few_seeds_are_told_what_they_cannot_show():
    assert statistics.least_p(3) == 0.25 and statistics.least_p(6) == 1 / 32
    assert statistics.power_sentence(3, 1) == (
        "3 seeds cannot reach p < 0.05 (least: 0.25); 6 can."
    )
    assert (
        statistics.power_sentence(6, 1) == "6 seeds can reach p < 0.05 (least: 0.031)."
    )
    text = statistics.power_sentence(6, 8)
    assert "not after Holm's adjustment for 8 comparisons" in text and "9 can" in text
    assert statistics.seeds_needed(8) == 9


@pytest.mark.parametrize("num_seeds", [6, 8, 10, 11])
def test_detectable_effect_is_found_four_times_in_five(num_seeds):
    effect = statistics.detectable_effect(num_seeds)
    p = statistics.sign_flip_p(draws(1000, num_seeds, seed=9) + effect)
    assert np.mean(p <= 0.05) == pytest.approx(0.8, abs=0.04)


def test_detectable_difference_is_in_the_unit_of_the_values():
    values = draws(6)
    found = statistics.detectable_difference(values)
    assert found == pytest.approx(values.std(ddof=1) * statistics.detectable_effect(6))
    assert statistics.detectable_difference(10 * values) == pytest.approx(10 * found)
    # Six of six have to lie on one side.
    exact = stats.norm.ppf(0.8 ** (1 / 6))
    assert statistics.detectable_effect(6) == pytest.approx(exact, abs=0.05)
    assert statistics.detectable_difference(values[:5]) == math.inf
    assert statistics.detectable_difference(values[:1]) == math.inf


def planted(best, num_seeds, seed, noise=0.03, rates=RATES):
    """Returns losses float[R, S]: a parabola, an offset a seed, and noise."""
    rng = np.random.default_rng(seed)
    away_R = special.logit(rates) - special.logit(best)
    offset_S = rng.normal(0, 0.05, num_seeds)
    noise_RxS = rng.normal(0, noise, (len(rates), num_seeds))
    return 4 + 0.05 * away_R[:, None] ** 2 + offset_S + noise_RxS


def test_planted_optimum_is_recovered():
    found = statistics.fit_optimum(RATES, planted(0.3, 4, seed=0, noise=0))
    assert found.rate == pytest.approx(0.3) and found.interior == 1
    assert found.low == pytest.approx(0.3) and found.high == pytest.approx(0.3)
    found = statistics.fit_optimum(RATES, planted(0.3, 1, seed=0, noise=0))
    assert found.rate == pytest.approx(0.3) and math.isnan(found.low)


@pytest.mark.parametrize("num_seeds", [3, 8])
def test_interval_of_the_optimum_is_students_where_noise_is_small(num_seeds):
    """Then the least place is linear in the losses, a mean of that of each seed."""
    losses = planted(0.3, num_seeds, seed=1, noise=1e-5)
    found = statistics.fit_optimum(RATES, losses)
    places = [statistics.fit_optimum(RATES, one[:, None]).rate for one in losses.T]
    places = special.logit(places)
    low, high = stats.t.interval(0.95, num_seeds - 1, places.mean(), stats.sem(places))
    width = special.logit(found.high) - special.logit(found.low)
    assert width == pytest.approx(high - low, rel=0.08)


@pytest.mark.parametrize("num_seeds", [3, 6])
def test_interval_of_the_optimum_holds_it(num_seeds):
    found = [
        statistics.fit_optimum(RATES, planted(0.3, num_seeds, seed))
        for seed in range(100)
    ]
    assert np.mean([f.low <= 0.3 <= f.high for f in found]) >= 0.88
    # Not because it holds everything.
    assert np.mean([f.high - f.low for f in found]) < 0.1


@pytest.mark.parametrize(
    "rates, best, part",
    [
        (RATES, 0.95, "least at 0.8, where they end"),
        (RATES, 0.01, "least at 0.05, where they end"),
        (RATES[:4], 0.35, "least at 0.2, where they end"),
        (RATES[:3], 0.1, "needs 4 rates or more; there are 3"),
    ],
)
def test_no_minimum_is_refused_with_a_sentence(rates, best, part):
    losses = planted(best, 4, seed=0, noise=0, rates=rates)
    with pytest.raises(statistics.NoOptimumError, match=part):
        statistics.fit_optimum(rates, losses)


def test_a_hill_and_a_rate_of_one_are_refused():
    with pytest.raises(statistics.NoOptimumError, match="where they end"):
        statistics.fit_optimum(RATES, -planted(0.3, 4, seed=0, noise=0))
    with pytest.raises(statistics.NoOptimumError, match="no logit"):
        statistics.fit_optimum([0.1, 0.2, 0.5, 1.0], np.ones((4, 2)))


def test_planted_trend_is_recovered():
    sizes = [1e5, 1e6, 1e7]
    best = special.expit(special.logit(0.2) + 0.5 * np.arange(3))
    losses = [planted(b, 6, seed) for seed, b in enumerate(best)]
    found = statistics.fit_trend(sizes, [RATES] * 3, losses)
    assert found.low < 0.5 < found.high and found.low > 0
    assert found.slope == pytest.approx(0.5, abs=0.2)
    with pytest.raises(statistics.NoOptimumError, match="two sizes"):
        statistics.fit_trend(sizes[:1], [RATES], losses[:1])
