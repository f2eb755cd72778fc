"""Which units are hidden and predicted: how many, nested, in views, in the slots."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlm_jax.corruption import select, units
from tests.corruption.helpers import (
    COUNTS,
    NUM_ROWS,
    STRATEGIES,
    assert_uniform,
    assert_within,
    corrupt,
    hidden,
    is_maskable,
    numbers,
    ordinary_rows,
    packed_batch,
    predicted,
    some_collocations,
)
from tests.helpers import NUM_SPECIAL, make_batch

# ---- the order ----------------------------------------------------------------------


def test_the_order_keeps_units_in_one_piece_and_tokens_of_none_last():
    """Also where two units have the same priority."""
    unit_L = np.array([8, 1, 1, 3, 8, 5, 5, 5])
    order_units = jax.jit(jax.vmap(select.order_units, in_axes=(0, None, None)))
    keys = jax.random.split(jax.random.key(0), 500)
    with pytest.MonkeyPatch.context() as patch:
        tied = jnp.array([0.5, 0.5, 0.1, 0.5, 0.9, 0.5, 0.7, 0.2])
        patch.setattr(jax.random, "uniform", lambda key, shape: tied)
        ties = select.order_units(None, unit_L, None)
    orders = jax.device_get(
        [order_units(keys, unit_L, None), jax.tree.map(lambda x: x[None], ties)]
    )
    for order in orders:
        for position_L, priority_L, size_L, start_L in zip(*order, strict=True):
            assert sorted(position_L) == list(range(8))
            assert set(position_L[6:]) == {0, 4}
            unit_of_L = unit_L[position_L][:6]
            begins_L = np.append(True, unit_of_L[1:] != unit_of_L[:-1])
            assert begins_L.sum() == 3
            first_L = np.maximum.accumulate(np.where(begins_L, np.arange(6), 0))
            np.testing.assert_array_equal(start_L[:6], first_L)
            sizes = {1: 2, 3: 1, 5: 3}
            assert size_L.tolist() == [sizes[unit] for unit in unit_of_L] + [0, 0]
            assert (np.diff(priority_L[:6]) >= 0).all()
    first = [unit_L[order] for order in orders[0].position_L[:, 0]]
    assert_uniform(np.unique(first, return_counts=True)[1])  # each unit as often


def test_a_unit_is_hidden_in_proportion_to_its_mean_weight():
    """Sixty-four units of one or two tokens, one of four times the others' weight."""
    unit_L = np.repeat(np.arange(0, 64, 2), 2)
    weight_L = np.ones(64, np.float32)
    weight_L[:2] = 3, 5

    @jax.jit
    @jax.vmap
    def is_chosen(key):
        order_key, draw_key = jax.random.split(key)
        order = select.order_units(order_key, unit_L, weight_L)
        draws = jax.random.uniform(draw_key, (2,))
        chosen_L = [
            select.chosen(draws, order, rate=0.125, min_predictions=0, count=count)
            for count in COUNTS
        ]
        return jnp.stack(chosen_L)[:, jnp.argsort(order.position_L)]

    share_CxL = is_chosen(jax.random.split(jax.random.key(0), NUM_ROWS)).mean(0)
    mean = 0.125 * 64 / weight_L.sum()
    for count, share_L in zip(COUNTS, share_CxL, strict=True):
        assert abs(share_L[0] - 4 * mean) < 0.04, count  # in proportion, nearly
        assert share_L[0] == share_L[1]
        assert abs(share_L[2:].mean() - mean) < 0.003
        assert abs(share_L.mean() - 0.125) < 0.001


# ---- how many -----------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.3, 0.4, 0.75, 1.0])
def test_exact_count_rounds_to_the_nearest_halves_to_even(rate):
    num_tokens_B = np.arange(65)
    batch = make_batch(ordinary_rows(65, num_tokens_B, length=64))
    out, ledger = corrupt(batch, numbers(rate, min_predictions=0), num_slots=64)
    # In rational arithmetic: 0.15 x 10 is 1.5 and counts as 2, 4.5 as 4.
    want_B = [round(Fraction(str(rate)) * int(n)) for n in num_tokens_B]
    assert out["weights"].sum(1).astype(int).tolist() == want_B
    assert ledger["num_overflow"] == 0


@pytest.mark.parametrize("start", [0, 203, 5000])
def test_an_exact_count_is_exact_whatever_the_draw(start):
    """In float32 203 + (1 - 2^-23) is 204, which is not less than a budget of 204."""
    largest = np.float32(1 - 2**-23)
    for size in (1, 2, 3, 5, 7, 16, 100):
        order = select.Order(*(jnp.array([x]) for x in (0, 0.5, size, start)))
        for budget, draw, want in [
            (start + size, largest, True),
            (start + size, 0, True),
            (start, 0, False),
            (start + 1, 0, True),
            (start + size - 1, largest, False),
        ]:
            is_within = select._within(jnp.float32(budget), jnp.array([0, draw]), order)
            assert bool(is_within[0]) == want, (size, budget, draw)


@pytest.mark.parametrize("rate, num_tokens", [(0.15, 10), (0.4, 13), (0.15, 16)])
def test_stochastic_count_has_the_right_mean_and_two_neighbouring_values(
    rate, num_tokens
):
    batch = make_batch(ordinary_rows(NUM_ROWS, num_tokens))
    hparams = numbers(rate, min_predictions=0)
    out, _ = corrupt(batch, hparams, count="stochastic")
    num_masked_B = out["weights"].sum(1)
    low = int(rate * num_tokens)
    assert set(num_masked_B.astype(int)) == {low, low + 1}
    share = rate * num_tokens - low
    deviation = np.sqrt(share * (1 - share) / NUM_ROWS)
    assert_within(num_masked_B.mean(), rate * num_tokens, deviation)


def test_stochastic_rounding_is_drawn_for_each_row_and_apart_from_the_order():
    """Were the rounding tied to the order, some positions would be met more often."""
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    out, _ = corrupt(batch, numbers(0.1, min_predictions=0), count="stochastic")
    is_predicted_BxL = predicted(out)
    is_rounded_up_B = is_predicted_BxL.sum(1) == 2
    assert_uniform(is_predicted_BxL[is_rounded_up_B].sum(0))
    assert_uniform(is_predicted_BxL[~is_rounded_up_B].sum(0))


def test_b09_share_of_short_rows_without_a_prediction():
    batch = make_batch(ordinary_rows(NUM_ROWS, 10))

    def num_masked_B(count, min_predictions):
        hparams = numbers(0.15, min_predictions)
        return corrupt(batch, hparams, count=count)[0]["weights"].sum(1)

    bernoulli_B = num_masked_B("bernoulli", 0)
    assert abs((bernoulli_B == 0).mean() - 0.85**10) < 0.012
    assert_within(bernoulli_B.mean(), 1.5, np.sqrt(10 * 0.15 * 0.85 / NUM_ROWS))
    assert (num_masked_B("exact", 0) == 2).all()

    assert num_masked_B("bernoulli", 1).min() == 1
    # The minimum moves only the rows below it.
    np.testing.assert_array_equal(
        np.maximum(bernoulli_B, 1), num_masked_B("bernoulli", 1)
    )
    assert (num_masked_B("exact", 3) == 3).all()


def test_the_minimum_never_exceeds_what_there_is():
    num_tokens_B = np.arange(NUM_ROWS) % 5
    batch = make_batch(ordinary_rows(NUM_ROWS, num_tokens_B))
    for count in COUNTS:
        out, ledger = corrupt(batch, numbers(0.001, min_predictions=3), count=count)
        np.testing.assert_array_equal(
            out["weights"].sum(1), np.minimum(num_tokens_B, 3)
        )
        assert ledger["num_overflow"] == 0


def test_positions_are_uniform():
    batch = make_batch(ordinary_rows(NUM_ROWS, 10))
    for count in COUNTS:
        for rate in (0.1, 0.4):
            out, _ = corrupt(batch, numbers(rate), count=count)
            counts_L = predicted(out).sum(0)
            assert_uniform(counts_L[:10])
            assert (counts_L[10:] == 0).all()


# ---- the realised rate, units or not ------------------------------------------------

RATES = (0.05, 0.15, 0.4, 0.8)


@functools.cache
def compile_counts(strategy):
    """Returns `(keys, batch, is_maskable_BxL, hparams) -> two int32[K, B, counts, …]`:
    the tokens of each row hidden under each key at each rate, and how many of those
    the next higher rate does not hide."""
    partition = units.make_partition(strategy, some_collocations())

    def of_row(key, row, is_maskable_L, hparams):
        unit_key, order_key, draw_key = jax.random.split(key, 3)
        unit_L = partition(
            unit_key, row["tokens"], row["word_start"], is_maskable_L, hparams
        )
        order = select.order_units(order_key, unit_L, None)
        draws = jax.random.uniform(draw_key, (2,))
        chosen = functools.partial(select.chosen, draws, order, min_predictions=0)
        is_chosen_CxRxL = jnp.stack(
            [jnp.stack([chosen(rate=r, count=c) for r in RATES]) for c in COUNTS]
        )
        is_left_out_CxRxL = is_chosen_CxRxL[:, :-1] & ~is_chosen_CxRxL[:, 1:]
        return is_chosen_CxRxL.sum(2), is_left_out_CxRxL.sum(2)

    def of_rows(key, batch, is_maskable_BxL, hparams):
        keys = jax.random.split(key, len(is_maskable_BxL))
        of_all = jax.vmap(of_row, in_axes=(0, 0, 0, None))
        return of_all(keys, batch, is_maskable_BxL, hparams)

    def of_keys(keys, *rest):
        return jax.lax.map(lambda key: of_rows(key, *rest), keys)

    return jax.jit(of_keys)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_realised_rate_is_the_configured_one(strategy):
    """Within 0.2 points, although units are whole: words of 1.7 pieces, spans of two
    words. (No minimum: one unit a row would be more than 5% of it.)"""
    rng = np.random.default_rng(0)
    num_tokens_B = rng.integers(20, 31, 2048)
    tokens_BxL = ordinary_rows(2048, num_tokens_B, length=32)
    batch = make_batch(tokens_BxL, word_start=rng.random(tokens_BxL.shape) < 0.6)
    hparams = numbers(0.15, strategy=strategy, span_max=3, ngram_max=3)
    keys = jax.random.split(jax.random.key(0), 24)
    num_hidden_KxBxCxR, num_left_out = jax.device_get(
        compile_counts(strategy)(keys, batch, is_maskable(batch), hparams)
    )
    assert (num_left_out == 0).all()  # masks are nested
    num_tokens_Bx1 = num_tokens_B[:, None].astype(np.float32)
    budget_BxR = np.float32(RATES)[None] * num_tokens_Bx1
    for c, count in enumerate(COUNTS):
        num_hidden_KxBxR = num_hidden_KxBxCxR[:, :, c]
        want_BxR = np.round(budget_BxR) if count == "exact" else budget_BxR
        if count == "exact" and strategy == "token":
            assert (num_hidden_KxBxR == want_BxR).all()
        bias_R = (num_hidden_KxBxR - want_BxR).mean((0, 1)) / num_tokens_B.mean()
        assert (abs(bias_R) < 0.002).all(), (count, bias_R)


@pytest.mark.parametrize("count", COUNTS)
def test_the_expected_count_is_right_in_every_row(count):
    """Not only on average over rows: eight rows whose words have other lengths, under
    a budget that whole words cannot meet."""
    starts_RxL = np.ones((8, 16), bool)
    for row, size in enumerate((1, 2, 3, 4, 5, 7, 8, 15)):
        starts_RxL[row] = np.arange(16) % size == 0
    batch = make_batch(
        np.full((NUM_ROWS, 16), NUM_SPECIAL),
        word_start=np.tile(starts_RxL, (NUM_ROWS // 8, 1)),
    )
    out, _ = corrupt(batch, numbers(0.3125, 0), count=count, strategy="word")
    num_hidden_RxN = hidden(out).sum(1).reshape(-1, 8).T
    for num_hidden_N in num_hidden_RxN:  # 5 of 16
        deviation = max(num_hidden_N.std(), 1e-9) / np.sqrt(len(num_hidden_N))
        assert_within(num_hidden_N.mean(), 5, deviation)


# ---- nested -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, count", [*(("token", count) for count in COUNTS), ("span", "stochastic")]
)
def test_masks_are_nested(strategy, count):
    """What a row hides at 15% it hides at 40% too, and in the same guise, also when
    the two have different numbers of slots."""
    batch = packed_batch(1, 256, 32)
    split = dict(strategy=strategy, mask_frac=0.3, random_frac=0.4)

    def run(rate, num_slots):
        hparams = numbers(rate, **split)
        out, _ = corrupt(
            batch, hparams, strategy=strategy, count=count, num_slots=num_slots
        )
        return hidden(out), predicted(out), out["inputs"]

    large_BxL, large_predicted_BxL, large_inputs_BxL = run(0.4, 32)
    np.testing.assert_array_equal(large_BxL, large_predicted_BxL)
    # One count is enough for the other slots: each is a compilation.
    for num_slots in (32, 16) if strategy == "span" else (32,):
        small_BxL, small_predicted_BxL, small_inputs_BxL = run(0.15, num_slots)
        assert (small_BxL <= large_BxL).all()
        assert (small_predicted_BxL <= large_predicted_BxL).all()
        assert small_BxL.sum() < 0.6 * large_BxL.sum()
        np.testing.assert_array_equal(
            small_inputs_BxL[small_BxL], large_inputs_BxL[small_BxL]
        )


# ---- views --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, count", [*(("token", count) for count in COUNTS), ("span", "stochastic")]
)
def test_views_are_disjoint_and_together_the_single_mask(strategy, count):
    batch = packed_batch(2, 256, 32)
    policy = dict(strategy=strategy, count=count, num_slots=32)
    for least in (0, 1):
        # 0.125 times 3 is 0.375 in float32, too.
        out, ledger = corrupt(batch, numbers(0.125, least, views=3), views=3, **policy)
        single, single_ledger = corrupt(batch, numbers(0.375, 3 * least), **policy)
        for name in ("row", "epoch", "tokens", "segment", "position", "unit"):
            np.testing.assert_array_equal(out[name], np.repeat(single[name], 3, axis=0))
        is_hidden_VxBxL = hidden(out).reshape(-1, 3, 32).swapaxes(0, 1)
        assert is_hidden_VxBxL.sum(0).max() == 1
        np.testing.assert_array_equal(is_hidden_VxBxL.any(0), hidden(single))
        np.testing.assert_array_equal(hidden(out), predicted(out))
        assert ledger["num_hidden"] == single_ledger["num_hidden"]
        assert ledger["num_maskable"] == 3 * single_ledger["num_maskable"]
        if least == 0:  # each view at the rate of one
            num_hidden_V = is_hidden_VxBxL.sum((1, 2))
            assert num_hidden_V.max() < 1.4 * num_hidden_V.min()


@pytest.mark.parametrize("count", ["exact", "stochastic"])
@pytest.mark.parametrize("views", [2, 3])
def test_no_view_of_tokens_draws_more_than_its_slots(count, views):
    """Of 25 tokens at 10% two views hide 2 and 3 where the nearest of 2.5 is 2."""

    def in_view(num_maskable, rate, draw, view):
        position_L = jnp.arange(40)
        is_there_L = (position_L < num_maskable).astype(jnp.int32)
        order = select.Order(position_L, 0.0 * position_L, is_there_L, position_L)
        draws = jnp.array([draw, draw])
        within = functools.partial(
            select.chosen, draws, order, min_predictions=0, count=count
        )
        return jnp.sum(within(rate=(view + 1) * rate) & ~within(rate=view * rate))

    in_views = in_view
    for axis in range(4):
        in_views = jax.vmap(in_views, [0 if a == axis else None for a in range(4)])
    rates = np.linspace(0.01, 1 / views, 24, dtype=np.float32)
    draws = np.array([0, 0.1, 0.5, 0.9, 1 - 2**-23], np.float32)
    # The last axis mapped is the first of the result.
    num_VxDxRxN = np.asarray(
        jax.jit(in_views)(np.arange(41), rates, draws, np.arange(views))
    )
    for r, rate in enumerate(rates):
        most_N = num_VxDxRxN[:, :, r].max((0, 1))
        for n in (14, 25, 40):
            assert most_N[: n + 1].max() <= capacity(count, rate, n, 0, views=views)


# ---- fewer predictions than corruptions ---------------------------------------------


@pytest.mark.parametrize(
    "strategy, count", [*(("token", count) for count in COUNTS), ("span", "stochastic")]
)
def test_predictions_are_those_of_a_lower_rate(strategy, count):
    """Wettig et al. 2023: 40% corrupted, 15% predicted."""
    batch = packed_batch(3, 256, 32)
    policy = dict(strategy=strategy, count=count, num_slots=32)
    hparams = numbers(
        0.5, 0, strategy=strategy, corruption_rate=0.5, prediction_rate=0.125
    )
    out, ledger = corrupt(batch, hparams, **policy)
    few, few_ledger = corrupt(batch, numbers(0.125, 0, strategy=strategy), **policy)
    many, _ = corrupt(batch, numbers(0.5, 0, strategy=strategy), **policy)
    np.testing.assert_array_equal(hidden(out), hidden(many))
    np.testing.assert_array_equal(predicted(out), predicted(few))
    assert (predicted(out) <= hidden(out)).all()
    assert (out["weights"] > 0).sum() == few_ledger["num_hidden"]
    num_maskable = is_maskable(batch).sum()
    assert abs(ledger["num_hidden"] / num_maskable - 0.5) < 0.05
    assert abs((out["weights"] > 0).sum() / num_maskable - 0.125) < 0.03


# ---- slots --------------------------------------------------------------------------


def capacity(count, rate, max_maskable, min_predictions, slack=0, views=1):
    return select.capacity(count, rate, max_maskable, min_predictions, slack, views)


def most_drawn(count, rate, max_maskable):
    """Returns the most that a row of up to `max_maskable` tokens draws: draws of 0 are
    all the luck that it can have."""

    def num_chosen(num_maskable, rate):
        position_L = jnp.arange(max_maskable)
        is_there_L = position_L < num_maskable
        order = select.Order(position_L, 0.0 * position_L, is_there_L, position_L)
        return select.chosen(
            jnp.zeros(2), order, rate=rate, min_predictions=0, count=count
        ).sum()

    counts_N = jax.jit(jax.vmap(num_chosen, in_axes=(0, None)))(
        np.arange(max_maskable + 1), np.float32(rate)
    )
    return int(counts_N.max())


@pytest.mark.parametrize(
    "rate, min_predictions, max_maskable, exact, stochastic",
    [
        (0.15, 1, 14, 2, 3),
        (0.15, 5, 14, 5, 5),
        (0.4, 1, 126, 50, 51),
        (1.0, 1, 14, 14, 14),
        (0.01, 0, 14, 1, 1),
        (0.4, 20, 14, 14, 14),
    ],
)
def test_capacity_is_the_most_that_a_row_draws(
    rate, min_predictions, max_maskable, exact, stochastic
):
    for count, want in (("exact", exact), ("stochastic", stochastic)):
        num_slots = capacity(count, rate, max_maskable, min_predictions)
        assert num_slots == want
        assert most_drawn(count, rate, max_maskable) <= num_slots
        for views, spare in ((1, 3), (2, 6), (5, 6)):
            num_slots = capacity(count, rate, max_maskable, min_predictions, 3, views)
            assert num_slots - min(want + spare, max_maskable) in (0, views > 1)


def test_b10_a_rate_of_40_percent_of_512_tokens_has_its_slots():
    assert capacity("exact", 0.4, 510, 1) == 204
    assert capacity("stochastic", 0.4, 510, 1) == 204
    assert capacity("bernoulli", 0.4, 510, 1) > 204 + 60


def test_rows_fill_their_slots_and_no_more():
    batch = make_batch(ordinary_rows(NUM_ROWS, np.arange(NUM_ROWS) % 17))
    for count in ("exact", "stochastic"):
        assert capacity(count, 0.5, 16, 1) == 8
        out, ledger = corrupt(batch, numbers(0.5), count=count, num_slots=8)
        assert ledger["num_overflow"] == 0
        assert out["weights"].sum(1).max() == 8


@pytest.mark.parametrize("count", ["exact", "stochastic"])
@pytest.mark.parametrize("max_maskable", [14, 100, 126, 375, 510])
def test_capacity_bounds_the_arithmetic_of_the_device(count, max_maskable):
    """Which is in single precision: 0.145 x 100 is 14.5 there, and 14.49… in double."""
    for rate in np.arange(0.005, 1, 0.005):
        mean = np.float32(rate) * np.float32(max_maskable)
        num_slots = capacity(count, rate, max_maskable, 0)
        drawn = {"exact": np.round, "stochastic": np.ceil}[count](mean)
        assert max(drawn, 1) == num_slots
    for rate in (0.145, 0.4):
        num_slots = capacity(count, rate, max_maskable, 1)
        assert most_drawn(count, rate, max_maskable) <= num_slots


def test_bernoulli_capacity_overflows_less_than_once_in_1e7():
    for num_tokens in (14, 126, 510):
        for rate in (0.15, 0.4, 0.9):
            num_slots = capacity("bernoulli", rate, num_tokens, 1)
            overflow = stats.binom.sf(num_slots, num_tokens, rate)
            assert overflow < 1e-7
    assert capacity("bernoulli", 0.15, 510, 1) == 125  # not simply L
    assert capacity("bernoulli", 0.15, 510, 200) == 200


def test_bernoulli_overflow_is_counted_and_dropped_uniformly():
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    hparams = numbers(0.5)
    whole, ledger = corrupt(batch, hparams, count="bernoulli")
    assert ledger["num_overflow"] == 0
    num_drawn_B = whole["weights"].sum(1)
    num_draws = NUM_ROWS * 16
    assert_within(num_drawn_B.sum() / num_draws, 0.5, 0.5 / np.sqrt(num_draws))

    cut, ledger = corrupt(batch, hparams, count="bernoulli", num_slots=8)
    np.testing.assert_array_equal(cut["weights"].sum(1), np.minimum(num_drawn_B, 8))
    dropped = np.maximum(num_drawn_B - 8, 0).sum()
    assert dropped > 0
    assert ledger["num_overflow"] == dropped
    is_cut_BxL = predicted(cut)
    assert (is_cut_BxL <= predicted(whole)).all()
    assert_uniform(is_cut_BxL[num_drawn_B > 8].sum(0))
    # What is dropped is not predicted; hidden it is as before.
    np.testing.assert_array_equal(cut["inputs"], whole["inputs"])
    assert ledger["num_hidden"] == num_drawn_B.sum()


@functools.cache
def compile_slots(num_slots):
    def of_row(key, unit_L, is_in_view_L):
        order = select.order_units(key, unit_L, None)
        # Any units, not only the first ones: a view does not begin at the first.
        first_L = jnp.minimum(unit_L, len(unit_L) - 1)
        is_predicted_L = (is_in_view_L[first_L] & (unit_L < len(unit_L)))[
            order.position_L
        ]
        return select.to_slots(is_predicted_L, order, num_slots), order, is_predicted_L

    return jax.jit(jax.vmap(of_row))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    num_slots=st.sampled_from([1, 5, 16]),
    longest=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_slots_take_whole_units_in_order_while_they_fit(num_slots, longest, seed):
    rng = np.random.default_rng(seed)
    is_start_BxL = rng.random((64, 16)) < 1 / longest
    is_start_BxL[:, 0] = True
    unit_BxL = np.maximum.accumulate(np.where(is_start_BxL, np.arange(16), 0), axis=1)
    # Units of no token at the end of a row.
    unit_BxL = np.where(unit_BxL < rng.integers(1, 17, (64, 1)), unit_BxL, 16)
    is_in_view_BxL = rng.random((64, 16)) < rng.random()
    keys = jax.random.split(jax.random.key(seed), 64)
    slots, order, is_predicted_BxL = jax.device_get(
        compile_slots(num_slots)(keys, unit_BxL, is_in_view_BxL)
    )
    for b, (predict_M, is_used_M, overflow) in enumerate(zip(*slots, strict=True)):
        positions = order.position_L[b][is_predicted_BxL[b]].tolist()
        units = [int(unit_BxL[b, position]) for position in positions]
        want = []
        for unit in dict.fromkeys(units):
            tokens = [p for p, u in zip(positions, units, strict=True) if u == unit]
            if len(want) + len(tokens) > num_slots:
                break
            want += tokens
        assert predict_M[is_used_M].tolist() == want
        assert overflow == len(positions) - len(want)
