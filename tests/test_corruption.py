"""Masks: where they may be, how many, what replaces them, and what they depend on."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlm_jax import config, keys
from mlm_jax.corruption import policy, replace, select
from mlm_jax.corruption.replace import Action
from tests.helpers import (
    CLS,
    MASK,
    NUM_SPECIAL,
    PAD,
    SEP,
    is_special,
    make_batch,
    make_corrupt,
)

COUNTS = tuple(select.COUNTS)
NUM_ROWS = 20_000  # one size where any will do: a batch of each compiles once a count


def numbers(rate, min_predictions=1, mask_frac=1.0, random_frac=0.0):
    return config.corruption_hparams(rate, min_predictions, mask_frac, random_frac)


@functools.cache
def compile_corrupt(**policy):
    return jax.jit(make_corrupt(**policy))


def corrupt(batch, hparams, *, seed=0, **policy):
    """Returns (batch, ledger) as NumPy arrays."""
    key = keys.purpose_key(jax.random.key(seed), keys.Purpose.CORRUPTION)
    return jax.device_get(compile_corrupt(**policy)(key, batch, hparams))


def ordinary_rows(num_rows, num_tokens, length=16, vocab_size=12, seed=0):
    """Rows that start with `num_tokens` ordinary tokens; the rest is padding."""
    rng = np.random.default_rng(seed)
    tokens_BxL = rng.integers(NUM_SPECIAL, vocab_size, (num_rows, length))
    num_tokens_B = np.broadcast_to(num_tokens, num_rows)
    is_padding_BxL = np.arange(length)[None] >= num_tokens_B[:, None]
    return np.where(is_padding_BxL, PAD, tokens_BxL)


def selected(batch):
    """Returns bool[B, L]: the positions predicted, after checking the slots."""
    is_used_BxM = batch["weights"] > 0
    num_used_BxL = np.zeros(batch["tokens"].shape, int)
    row_B = np.arange(len(num_used_BxL))
    np.add.at(num_used_BxL, (row_B[:, None], batch["predict"]), is_used_BxM)
    # No position twice: it would count double in the loss.
    assert num_used_BxL.max() <= 1
    return num_used_BxL == 1


def assert_within(value, mean, deviation):
    """Five standard deviations: a right program fails once in two million."""
    assert abs(value - mean) < 5 * deviation, (value, mean, deviation)


def assert_uniform(counts):
    assert stats.chisquare(counts).pvalue > 0.001, counts


# ---- what may be hidden -------------------------------------------------------------


def test_b01_padding_is_never_predicted():
    """Padding is known by its segment, and by its id should a segment contain it."""
    by_segment_BxL = ordinary_rows(NUM_ROWS, [5, 12] * (NUM_ROWS // 2))
    segment_BxL = (by_segment_BxL != PAD).astype(np.int32)
    by_segment_BxL[by_segment_BxL == PAD] = NUM_SPECIAL  # an ordinary id
    by_id_BxL = ordinary_rows(NUM_ROWS, [5, 12] * (NUM_ROWS // 2))

    for tokens_BxL, segments_BxL in (
        (by_segment_BxL, segment_BxL),
        (by_id_BxL, np.ones_like(segment_BxL)),
    ):
        # Two rows, visited in 500 epochs and more.
        batch = make_batch(
            tokens_BxL,
            segments_BxL,
            epoch=np.arange(NUM_ROWS) // 2,
            row=np.arange(NUM_ROWS) % 2,
        )
        for count in COUNTS:
            out, ledger = corrupt(batch, numbers(0.5), count=count)
            is_selected_BxL = selected(out)
            assert not is_selected_BxL[segment_BxL == 0].any()
            # Each real position is met, so the above is not for want of draws.
            for row in (0, 1):
                is_real_L = segment_BxL[row] > 0
                assert is_selected_BxL[row::2].any(0)[is_real_L].all()
            assert ledger["num_maskable"] == segment_BxL.sum()


def test_b02_no_special_token_of_a_packed_row_is_predicted():
    tokens_L = [CLS, 5, 6, SEP, CLS, 7, 8, SEP, CLS, 9, 10, SEP] + [PAD] * 4
    segment_L = [1] * 4 + [2] * 4 + [3] * 4 + [0] * 4
    batch = make_batch(
        [tokens_L] * NUM_ROWS,
        [segment_L] * NUM_ROWS,
        epoch=np.arange(NUM_ROWS),
        row=np.full(NUM_ROWS, 7),
    )
    out, _ = corrupt(batch, numbers(0.9), count="exact")
    is_selected_BxL = selected(out)
    assert np.flatnonzero(is_selected_BxL.any(0)).tolist() == [1, 2, 5, 6, 9, 10]
    assert (is_selected_BxL.sum(1) == 5).all()  # 0.9 x 6, rounded


def test_b32_ids_come_from_the_vocabulary():
    """[PAD] is 7, [MASK] is 1, and id 0 is an ordinary word."""
    is_special_V = is_special(12, special_ids=(7, 1, 3, 5, 6))
    fn = policy.make_corrupt(
        count="exact",
        num_slots=8,
        random_pool="non_special",
        mask_id=1,
        is_special_V=is_special_V,
    )
    tokens_L = np.array([5, 0, 2, 0, 4, 6, 7, 7])
    segment_L = np.array([1, 1, 1, 1, 1, 1, 0, 0])
    batch = make_batch([tokens_L], [segment_L])
    out, _ = jax.device_get(jax.jit(fn)(jax.random.key(0), batch, numbers(1.0)))
    assert out["inputs"][0].tolist() == [5, 1, 1, 1, 1, 6, 7, 7]
    assert np.flatnonzero(selected(out)[0]).tolist() == [1, 2, 3, 4]
    assert replace.non_special(is_special_V).tolist() == [0, 2, 4, 8, 9, 10, 11]


def test_unselected_inputs_are_unchanged_and_targets_are_the_originals():
    batch = make_batch(ordinary_rows(NUM_ROWS, np.arange(NUM_ROWS) % 17))
    for count in COUNTS:
        hparams = numbers(0.4, mask_frac=0.4, random_frac=0.5)
        out, _ = corrupt(batch, hparams, count=count)
        is_selected_BxL = selected(out)
        is_other_BxL = ~is_selected_BxL
        np.testing.assert_array_equal(
            out["inputs"][is_other_BxL], batch["tokens"][is_other_BxL]
        )
        is_used_BxM = out["weights"] == 1
        original_BxM = np.take_along_axis(out["tokens"], out["predict"], 1)
        np.testing.assert_array_equal(
            out["targets"][is_used_BxM], original_BxM[is_used_BxM]
        )
        # Slots that are not in use are in range and weigh exactly nothing.
        assert (out["weights"][~is_used_BxM] == 0).all()
        assert (out["predict"][~is_used_BxM] == 0).all()
        np.testing.assert_array_equal(out["tokens"], batch["tokens"])


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
    is_selected_BxL = selected(out)
    is_rounded_up_B = is_selected_BxL.sum(1) == 2
    assert_uniform(is_selected_BxL[is_rounded_up_B].sum(0))
    assert_uniform(is_selected_BxL[~is_rounded_up_B].sum(0))


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
            counts_L = selected(out).sum(0)
            assert_uniform(counts_L[:10])
            assert (counts_L[10:] == 0).all()


def most_drawn(count, rate, max_maskable):
    """Returns the most that a row of up to `max_maskable` tokens draws: a uniform draw
    of 0 is all the luck that it can have."""

    def draw(num_maskable, rate):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "uniform", lambda key: jnp.float32(0))
            return select.COUNTS[count](None, None, rate * num_maskable, rate)

    counts_N = jax.jit(jax.vmap(draw, in_axes=(0, None)))(
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
        num_slots = select.capacity(count, rate, max_maskable, min_predictions)
        assert num_slots == want
        assert most_drawn(count, rate, max_maskable) <= num_slots


def test_rows_fill_their_slots_and_no_more():
    batch = make_batch(ordinary_rows(NUM_ROWS, np.arange(NUM_ROWS) % 17))
    for count in ("exact", "stochastic"):
        assert select.capacity(count, 0.5, 16, 1) == 8
        out, ledger = corrupt(batch, numbers(0.5), count=count, num_slots=8)
        assert ledger["num_overflow"] == 0
        assert out["weights"].sum(1).max() == 8


@pytest.mark.parametrize("count", ["exact", "stochastic"])
@pytest.mark.parametrize("max_maskable", [14, 100, 126, 375, 510])
def test_capacity_bounds_the_arithmetic_of_the_device(count, max_maskable):
    """Which is in single precision: 0.145 x 100 is 14.5 there, and 14.49… in double."""
    for rate in np.arange(0.005, 1, 0.005):
        mean = np.float32(rate) * np.float32(max_maskable)
        num_slots = select.capacity(count, rate, max_maskable, 0)
        drawn = {"exact": np.round, "stochastic": np.ceil}[count](mean)
        assert max(drawn, 1) == num_slots
    for rate in (0.145, 0.4):
        num_slots = select.capacity(count, rate, max_maskable, 1)
        assert most_drawn(count, rate, max_maskable) <= num_slots


def test_bernoulli_capacity_overflows_less_than_once_in_1e7():
    for num_tokens in (14, 126, 510):
        for rate in (0.15, 0.4, 0.9):
            num_slots = select.capacity("bernoulli", rate, num_tokens, 1)
            overflow = stats.binom.sf(num_slots, num_tokens, rate)
            assert overflow < 1e-7
    assert select.capacity("bernoulli", 0.15, 510, 1) == 125  # not simply L
    assert select.capacity("bernoulli", 0.15, 510, 200) == 200


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
    assert ledger["num_mask_tokens"] == cut["weights"].sum()
    is_cut_BxL = selected(cut)
    assert (is_cut_BxL <= selected(whole)).all()
    assert_uniform(is_cut_BxL[num_drawn_B > 8].sum(0))
    # What was dropped is an ordinary, visible token again.
    np.testing.assert_array_equal(
        cut["inputs"][~is_cut_BxL], batch["tokens"][~is_cut_BxL]
    )


# ---- what replaces them -------------------------------------------------------------


def test_b05_random_replacements_are_uniform_over_the_ordinary_ids():
    """100,000 selected positions, a vocabulary of 12 with 5 specials."""
    batch = make_batch(ordinary_rows(NUM_ROWS, 5))
    hparams = numbers(1.0, mask_frac=0.0, random_frac=1.0)
    out, ledger = corrupt(batch, hparams)
    assert ledger["num_random_tokens"] == 100_000
    inputs_N, tokens_N = (out[name][:, :5].ravel() for name in ("inputs", "tokens"))
    counts_V = np.bincount(inputs_N, minlength=12)
    assert (counts_V[:NUM_SPECIAL] == 0).all()
    assert_uniform(counts_V[NUM_SPECIAL:])
    # Nor does the draw know the original, which one in seven therefore equals.
    deviation = np.sqrt(1 / 7 * 6 / 7 / 100_000)
    assert_within((inputs_N == tokens_N).mean(), 1 / 7, deviation)


def test_the_full_vocabulary_pool_draws_specials_as_often():
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    hparams = numbers(1.0, mask_frac=0.0, random_frac=1.0)
    out, _ = corrupt(batch, hparams, random_pool="full_vocab")
    assert_uniform(np.bincount(out["inputs"].ravel(), minlength=12))


def test_the_split_is_80_10_10_over_two_million_draws():
    @jax.jit
    def count_actions(seed):
        tokens_N = jnp.full(2_000_000, NUM_SPECIAL)
        inputs_N, action_N = replace.replace(
            jax.random.key(seed),
            tokens_N,
            jnp.ones_like(tokens_N, bool),
            mask_frac=0.8,
            random_frac=0.1,
            mask_id=MASK,
            pool_P=np.arange(6, 12),
        )
        is_input = [
            inputs_N == MASK,
            (inputs_N >= 6) & (inputs_N < 12),
            inputs_N == NUM_SPECIAL,
        ]
        is_action = [
            action_N == action for action in (Action.MASK, Action.RANDOM, Action.KEEP)
        ]
        return jnp.stack(is_input).sum(1), jnp.stack(is_action).sum(1)

    by_input, by_action = jax.device_get(count_actions(0))
    # What the ledger says is what the inputs show.
    np.testing.assert_array_equal(by_input, by_action)
    for num, share in zip(by_input, (0.8, 0.1, 0.1), strict=True):
        assert abs(num / 2_000_000 - share) < 0.003
        assert_within(num / 2_000_000, share, np.sqrt(share * (1 - share) / 2e6))


@pytest.mark.parametrize(
    "mask_frac, random_frac", [(0.5, 0.25), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]
)
def test_the_split_is_met_and_the_ledger_tells_it(mask_frac, random_frac):
    num = NUM_ROWS * 16
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    hparams = numbers(1.0, mask_frac=mask_frac, random_frac=random_frac)
    out, ledger = corrupt(batch, hparams)
    shares = {
        "num_mask_tokens": mask_frac,
        "num_random_tokens": random_frac,
        "num_kept_tokens": 1 - mask_frac - random_frac,
    }
    assert sum(ledger[name] for name in shares) == num
    for name, share in shares.items():
        if share in (0, 1):
            assert ledger[name] == share * num  # exactly: no stray draw
        else:
            assert_within(ledger[name], share * num, np.sqrt(share * (1 - share) * num))
    assert (out["inputs"] == MASK).sum() == ledger["num_mask_tokens"]
    if mask_frac + random_frac == 0:
        np.testing.assert_array_equal(out["inputs"], batch["tokens"])


def test_replacement_is_independent_of_selection():
    """At a low rate only positions early in the order are seen: were one draw used for
    both, the split and the random tokens would be biased there."""
    batch = make_batch(np.full((NUM_ROWS, 16), NUM_SPECIAL))
    out, ledger = corrupt(batch, numbers(0.1, 1, 0.5, 0.4), count="stochastic")
    num = out["weights"].sum()
    for name, share in (("mask", 0.5), ("random", 0.4)):
        deviation = np.sqrt(share * (1 - share) * num)
        assert_within(ledger[f"num_{name}_tokens"], share * num, deviation)
    others = out["inputs"][(out["inputs"] > NUM_SPECIAL)]
    assert_uniform(np.bincount(others)[NUM_SPECIAL + 1 :])


# ---- what they depend on ------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_b12_masks_differ_between_epochs_and_a_second_run_is_equal(count):
    tokens_BxL = ordinary_rows(NUM_ROWS, 16)
    runs = [
        corrupt(make_batch(tokens_BxL, epoch=epoch), numbers(0.4), count=count)
        for epoch in (0, 1, 0)
    ]
    first, second, again = (selected(out) for out, _ in runs)
    assert (first == second).all(1).mean() < 0.01
    jax.tree.map(np.testing.assert_array_equal, runs[0], runs[2])
    # Rows of one epoch do not share their masks either, nor do two seeds.
    assert (first[:-1] == first[1:]).all(1).mean() < 0.01
    other = selected(
        corrupt(make_batch(tokens_BxL), numbers(0.4), count=count, seed=1)[0]
    )
    assert (first == other).all(1).mean() < 0.01


def test_b12_row_r_of_epoch_e_is_not_row_e_of_epoch_r():
    """Keys that were added or xor-ed, not folded one into the other, would be."""
    epoch_B, row_B = np.divmod(np.arange(64), 8)
    row_keys = keys.row_keys(jax.random.key(0), epoch_B, row_B)
    assert len(np.unique(jax.random.key_data(row_keys), axis=0)) == 64


@pytest.mark.parametrize("count", COUNTS)
def test_b12_a_rows_mask_is_its_own(count):
    """Not of the batch's size, its order, or the neighbours."""
    tokens_BxL = ordinary_rows(64, np.arange(64) % 17)
    hparams = numbers(0.4, mask_frac=0.4, random_frac=0.4)
    batch = make_batch(tokens_BxL, epoch=3)
    whole, _ = corrupt(batch, hparams, count=count)
    names = ("inputs", "predict", "targets", "weights")

    def check(rows, out):
        for name in names:
            np.testing.assert_array_equal(out[name], whole[name][rows])

    shuffled = np.random.default_rng(0).permutation(64)
    for rows in (shuffled, np.array([41, 3])):
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        check(rows, corrupt(part, hparams, count=count)[0])

    others_BxL = ordinary_rows(64, 16, seed=1)
    others_BxL[41] = tokens_BxL[41]
    out, _ = corrupt(make_batch(others_BxL, epoch=3), hparams, count=count)
    for name in names:
        np.testing.assert_array_equal(out[name][41], whole[name][41])


def test_a_mask_does_not_depend_on_what_the_tokens_are():
    """On the row's id, not on its text: only which positions are ordinary counts."""
    hparams = numbers(0.4, mask_frac=0.4, random_frac=0.6)
    one, other = (
        corrupt(make_batch(ordinary_rows(64, 16, seed=seed)), hparams)[0]
        for seed in (0, 1)
    )
    is_selected_BxL = selected(one)
    np.testing.assert_array_equal(is_selected_BxL, selected(other))
    np.testing.assert_array_equal(
        one["inputs"][is_selected_BxL], other["inputs"][is_selected_BxL]
    )


def test_purposes_keep_their_numbers_and_share_no_key():
    assert {purpose.name: purpose.value for purpose in keys.Purpose} == {
        "INIT": 0,
        "CORRUPTION": 1,
        "DROPOUT": 2,
    }
    key = jax.random.key(0)
    purpose_keys = jnp.stack([keys.purpose_key(key, p) for p in keys.Purpose])
    assert len(np.unique(jax.random.key_data(purpose_keys), axis=0)) == 3


@pytest.mark.parametrize("count", COUNTS)
def test_masks_are_nested(count):
    """What a row hides at 15% it hides at 40% too, and in the same guise, also when
    the two have different numbers of slots."""
    batch = make_batch(ordinary_rows(NUM_ROWS, np.arange(NUM_ROWS) % 17))
    split = dict(mask_frac=0.3, random_frac=0.4)

    def run(rate, num_slots):
        hparams = numbers(rate, **split)
        out, _ = corrupt(batch, hparams, count=count, num_slots=num_slots)
        return selected(out), out["inputs"]

    large_BxL, large_inputs_BxL = run(0.4, 16)
    for num_slots in (16, 8):
        small_BxL, small_inputs_BxL = run(0.15, num_slots)
        assert (small_BxL <= large_BxL).all()
        assert small_BxL.sum() < 0.6 * large_BxL.sum()
        np.testing.assert_array_equal(
            small_inputs_BxL[small_BxL], large_inputs_BxL[small_BxL]
        )


def test_no_number_recompiles():
    num_traces = 0
    fn = make_corrupt(count="stochastic")

    @jax.jit
    def traced(key, batch, hparams):
        nonlocal num_traces
        num_traces += 1
        return fn(key, batch, hparams)

    batch = make_batch(ordinary_rows(4, 16))
    hashes = [
        int(traced(jax.random.key(seed), batch, numbers(*values))[1]["mask_hash"])
        for seed, *values in (
            (0, 0.15, 1, 0.8, 0.1),
            (0, 0.4, 1, 0.8, 0.1),
            (0, 0.15, 9, 0.8, 0.1),
            (0, 0.15, 1, 0.0, 0.1),
            (0, 0.15, 1, 0.0, 1.0),
            (1, 0.15, 1, 0.8, 0.1),
        )
    ]
    assert num_traces == 1
    assert len(set(hashes)) == len(hashes)  # and yet every number was heard


# ---- the ledger's hash --------------------------------------------------------------


def python_hash(epoch, row, position, token):
    """The hash of one predicted position, in Python's integers."""
    state = 0
    for value in (epoch, row, position, token):
        state = ((state ^ value) + 0x9E3779B9) % 2**32
        state = (state ^ (state >> 16)) * 0x85EBCA6B % 2**32
        state = (state ^ (state >> 13)) * 0xC2B2AE35 % 2**32
        state ^= state >> 16
    return state


def test_mask_hash_is_a_sum_over_predicted_positions():
    batch = make_batch(ordinary_rows(64, 16), epoch=2)
    hparams = numbers(0.4, mask_frac=0.3, random_frac=0.4)
    out, ledger = corrupt(batch, hparams)
    want = sum(
        python_hash(2, row, position, int(out["inputs"][row, position]))
        for row, position in np.argwhere(selected(out)).tolist()
    )
    assert int(ledger["mask_hash"]) == want % 2**32


def test_mask_hash_does_not_see_how_rows_are_dealt_out():
    batch = make_batch(ordinary_rows(64, 16))
    hparams = numbers(0.4, mask_frac=0.3, random_frac=0.4)

    def hash_of(rows, seed=0):
        part = jax.tree.map(lambda x: x[rows], batch)
        return int(corrupt(part, hparams, seed=seed)[1]["mask_hash"])

    whole = hash_of(np.arange(64))
    shuffled = np.random.default_rng(0).permutation(64)
    assert hash_of(shuffled) == whole
    parts = [hash_of(shuffled[i::4]) for i in range(4)]
    assert sum(parts) % 2**32 == whole
    assert hash_of(np.arange(64), seed=1) != whole


def test_mask_hash_sees_every_change():
    batch = {"epoch": np.array([0, 0]), "row": np.array([0, 1])}
    inputs_BxL = np.full((2, 4), MASK)
    action_BxL = np.array([[1, 0, 3, 0], [0, 2, 0, 0]])

    def hash_of(batch, inputs_BxL, action_BxL):
        return int(policy.mask_hash(batch, inputs_BxL, action_BxL))

    other_inputs_BxL, other_action_BxL = inputs_BxL.copy(), action_BxL.copy()
    other_inputs_BxL[0, 2] = 9
    other_action_BxL[0] = [0, 1, 3, 0]
    hashes = [
        hash_of(batch, inputs_BxL, action_BxL),
        hash_of(batch, other_inputs_BxL, action_BxL),
        hash_of(batch, inputs_BxL, other_action_BxL),
        hash_of(batch | {"epoch": np.array([1, 0])}, inputs_BxL, action_BxL),
        hash_of(batch | {"row": np.array([2, 1])}, inputs_BxL, action_BxL),
    ]
    assert len(set(hashes)) == len(hashes)
    # At a position that is not predicted there is nothing to see.
    other_inputs_BxL = inputs_BxL.copy()
    other_inputs_BxL[0, 1] = 9
    assert hash_of(batch, other_inputs_BxL, action_BxL) == hashes[0]


# ---- all of it at once --------------------------------------------------------------

VOCABULARIES = {  # name: (special ids, the mask's id, the pool)
    "specials last": ((11, 12, 13, 14, 15), 11, "non_special"),
    "specials scattered": ((7, 1, 3, 5, 9), 1, "full_vocab"),
}


@functools.cache
def compile_property(vocabulary, count):
    special_ids, mask_id, random_pool = VOCABULARIES[vocabulary]
    return jax.jit(
        policy.make_corrupt(
            count=count,
            num_slots=16,
            random_pool=random_pool,
            mask_id=mask_id,
            is_special_V=is_special(16, special_ids),
        )
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from(sorted(VOCABULARIES)),
    count=st.sampled_from(COUNTS),
    rate=st.floats(2**-10, 1, width=32),
    min_predictions=st.integers(0, 20),
    fracs=st.sampled_from([(0.8, 0.1), (1, 0), (0, 1), (0, 0), (0.3, 0.7)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_corruption_of_any_rows(vocabulary, count, rate, min_predictions, fracs, seed):
    special_ids, mask_id, random_pool = VOCABULARIES[vocabulary]
    rng = np.random.default_rng(seed)
    tokens_BxL = rng.integers(0, 16, (4, 16))
    # Ends of rows are padding, ids 0 and 15 included.
    segment_BxL = np.sort(rng.integers(0, 4, (4, 16)), axis=1)[:, ::-1]
    batch = make_batch(
        tokens_BxL, segment_BxL, epoch=rng.integers(100), row=rng.integers(0, 2**31, 4)
    )
    hparams = numbers(rate, min_predictions, *fracs)
    fn = compile_property(vocabulary, count)
    out, ledger = jax.device_get(fn(jax.random.key(seed), batch, hparams))

    is_maskable_BxL = (segment_BxL > 0) & ~np.isin(tokens_BxL, special_ids)
    is_selected_BxL = selected(out)
    num_masked_B = is_selected_BxL.sum(1)
    assert (is_selected_BxL <= is_maskable_BxL).all()
    inputs_BxL = out["inputs"]
    np.testing.assert_array_equal(
        inputs_BxL[~is_selected_BxL], tokens_BxL[~is_selected_BxL]
    )
    changed = inputs_BxL[is_selected_BxL & (inputs_BxL != tokens_BxL)]
    if random_pool == "non_special":
        assert set(changed) <= {mask_id} | (set(range(16)) - set(special_ids))
    is_used_BxM = out["weights"] == 1
    assert set(out["weights"].ravel()) <= {0, 1}
    original_BxM = np.take_along_axis(tokens_BxL, out["predict"], 1)
    np.testing.assert_array_equal(
        out["targets"][is_used_BxM], original_BxM[is_used_BxM]
    )

    num_maskable_B = is_maskable_BxL.sum(1)
    floor_B = np.minimum(min_predictions, num_maskable_B)
    assert (num_masked_B >= floor_B).all()
    if count != "bernoulli":
        most_B = np.maximum(np.ceil(rate * num_maskable_B), floor_B)
        assert (num_masked_B <= most_B).all()
    assert ledger["num_maskable"] == num_maskable_B.sum()
    assert ledger["num_overflow"] == 0
    parts = ("num_mask_tokens", "num_random_tokens", "num_kept_tokens")
    assert sum(ledger[name] for name in parts) == num_masked_B.sum()
