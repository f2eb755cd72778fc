"""What stands at a hidden position: the split, the pools, one draw a unit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax.corruption import replace
from mlm_jax.corruption.replace import Action
from tests.corruption.helpers import (
    NUM_ROWS,
    VOCAB_SIZE,
    assert_proportional,
    assert_uniform,
    assert_within,
    corrupt,
    hidden,
    numbers,
    ordinary_rows,
)
from tests.helpers import MASK, NUM_SPECIAL, is_special, make_batch

SPLITS = [(0.8, 0.1), (0.5, 0.25), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.3, 0.7)]
NUM_DRAWS = 2_000_000


@functools.cache
def compile_counts():
    """Returns `(seed, mask_frac, random_frac, per_unit) -> (by input, by action)`."""
    is_special_V = np.arange(12) < 6  # NUM_SPECIAL, the original, is not in the pool

    def count(seed, mask_frac, random_frac, per_unit):
        tokens_N = jnp.full(NUM_DRAWS, NUM_SPECIAL)
        inputs_N, action_N = replace.replace(
            jax.random.key(seed),
            tokens_N,
            jnp.arange(NUM_DRAWS),
            jnp.ones_like(tokens_N, bool),
            mask_frac=mask_frac,
            random_frac=random_frac,
            per_unit=per_unit,
            mask_id=MASK,
            thresholds_V=replace.non_special(is_special_V, None),
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

    return jax.jit(count)


@pytest.mark.parametrize("mask_frac, random_frac", SPLITS)
def test_b03_the_split_over_two_million_draws(mask_frac, random_frac):
    by_input, by_action = jax.device_get(
        compile_counts()(0, np.float32(mask_frac), np.float32(random_frac), False)
    )
    # What the ledger says is what the inputs show.
    np.testing.assert_array_equal(by_input, by_action)
    split = mask_frac, random_frac, 1 - mask_frac - random_frac
    for num, share in zip(by_input, split, strict=True):
        assert abs(num / NUM_DRAWS - share) < 0.003
        if round(share, 6) in (0, 1):
            # Exactly: no stray draw. (A float32 sum may leave one draw in 2^24.)
            assert abs(num - round(share) * NUM_DRAWS) <= (mask_frac == 0.3)
    shares = [share if share > 1e-6 else 0 for share in split]
    if mask_frac != 0.3:
        assert_proportional(by_input, shares)


@pytest.mark.parametrize("mask_frac, random_frac", SPLITS[1:5])
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
    assert sum(ledger[name] for name in shares) == num == ledger["num_hidden"]
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


# ---- pools --------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "random_pool, weights",
    [
        ("full_vocab", np.ones(VOCAB_SIZE)),
        # As often as they occur, which in `make_corrupt` is id times; specials never.
        ("unigram", np.arange(VOCAB_SIZE) * (np.arange(VOCAB_SIZE) >= NUM_SPECIAL)),
    ],
)
def test_pools_draw_as_they_say(random_pool, weights):
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    hparams = numbers(1.0, mask_frac=0.0, random_frac=1.0)
    out, _ = corrupt(batch, hparams, random_pool=random_pool)
    counts_V = np.bincount(out["inputs"].ravel(), minlength=VOCAB_SIZE)
    assert_proportional(counts_V, weights)


@pytest.mark.parametrize("name", replace.POOLS)
def test_any_32_bits_draw_a_token_of_the_pool(name):
    """The lowest and the highest too; a token of count 0 and one after the last with
    any are never drawn; and a vocabulary of one."""
    is_special_V = is_special(9, special_ids=(0, 3, 8))
    counts_V = np.array([100, 0, 2, 7, 1, 0, 10**9, 0, 5])
    pools = {
        "non_special": {1, 2, 4, 5, 6, 7},
        "full_vocab": set(range(9)),
        "unigram": {2, 4, 6},
    }
    thresholds_V = replace.POOLS[name](is_special_V, counts_V)
    assert thresholds_V.dtype == np.uint32
    edges = np.array([0, 1, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1], np.uint32)
    bits = np.concatenate([edges, thresholds_V - 1, thresholds_V, thresholds_V + 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", lambda key, shape: jnp.asarray(bits))
        drawn = set(np.asarray(replace.draw_tokens(None, bits.shape, thresholds_V)))
    assert drawn <= pools[name]
    if name != "unigram":  # a share of 1e-9 of 2^32 is 4
        assert drawn == pools[name]
    only = replace.POOLS[name](np.arange(9) != 6, counts_V * (np.arange(9) == 6))
    if name != "full_vocab":
        assert set(np.asarray(replace.draw_tokens(jax.random.key(0), (99,), only))) == {
            6
        }


def test_a_large_vocabulary_is_drawn_evenly():
    """30,522 ids, in 256 groups: what an error of the thresholds would add up to."""
    thresholds_V = replace.non_special(np.arange(30_522) < 1000, None)
    drawn_N = np.asarray(
        replace.draw_tokens(jax.random.key(0), (1_000_000,), thresholds_V)
    )
    assert drawn_N.min() >= 1000 and drawn_N.max() < 30_522
    groups_V = np.arange(30_522) * 256 // 30_522
    num_ids = np.bincount(groups_V[1000:], minlength=256)
    assert_proportional(np.bincount(groups_V[drawn_N], minlength=256), num_ids)


# ---- one draw for a unit ------------------------------------------------------------


@functools.cache
def word_batch():
    """Rows of four words of four pieces."""
    return make_batch(
        np.full((NUM_ROWS, 16), NUM_SPECIAL), word_start=np.arange(16) % 4 == 0
    )


def test_one_action_for_a_whole_unit_or_one_for_each_token():
    def actions_NxU(replacement_unit):
        hparams = numbers(
            0.5, 1, 0.5, 0.25, strategy="word", replacement_unit=replacement_unit
        )
        out, _ = corrupt(word_batch(), hparams, strategy="word")
        # Hidden words only, four tokens each.
        return out["action"].reshape(-1, 4)[hidden(out).reshape(-1, 4).all(1)], out

    by_unit_NxU, out = actions_NxU("unit")
    assert len(by_unit_NxU) == 2 * NUM_ROWS
    assert (by_unit_NxU == by_unit_NxU[:, :1]).all()
    assert_proportional(np.bincount(by_unit_NxU[:, 0])[1:], (0.5, 0.25, 0.25))
    # A unit is replaced by random tokens, each drawn for itself.
    is_random_BxL = out["action"] == Action.RANDOM
    random_NxU = out["inputs"].reshape(-1, 4)[is_random_BxL.reshape(-1, 4).all(1)]
    pairs = np.bincount(random_NxU[:, 0] * VOCAB_SIZE + random_NxU[:, 1])
    assert_uniform(pairs[pairs > 0])
    assert (pairs > 0).sum() == 49

    by_token_NxU, _ = actions_NxU("token")
    assert_proportional(np.bincount(by_token_NxU.ravel())[1:], (0.5, 0.25, 0.25))
    pairs = np.bincount(4 * by_token_NxU[:, 0] + by_token_NxU[:, 1], minlength=16)
    law = np.outer((0, 2, 1, 1), (0, 2, 1, 1)).ravel()
    assert_proportional(pairs, law)  # independent of each other
    same_N = (by_token_NxU == by_token_NxU[:, :1]).all(1)
    share = 0.5**4 + 2 * 0.25**4
    deviation = np.sqrt(share * (1 - share) / len(same_N))
    assert_within(same_N.mean(), share, deviation)


@pytest.mark.parametrize("replacement_unit", ["token", "unit"])
def test_b06_words_follow_the_split_and_the_seed(replacement_unit):
    split = dict(strategy="word", replacement_unit=replacement_unit)

    def run(seed, mask_frac=1.0, random_frac=0.0):
        hparams = numbers(0.5, 1, mask_frac, random_frac, **split)
        return corrupt(word_batch(), hparams, seed=seed, strategy="word")

    first, ledger = run(0)
    assert (first["inputs"][hidden(first)] == MASK).all()
    assert ledger["num_mask_tokens"] == ledger["num_hidden"] == 8 * NUM_ROWS
    jax.tree.map(np.testing.assert_array_equal, (first, ledger), run(0))
    other, other_ledger = run(1)
    # Two of four words: one row in six by chance.
    same = (hidden(first) == hidden(other)).all(1).mean()
    assert_within(same, 1 / 6, np.sqrt(5 / 36 / NUM_ROWS))
    assert ledger["mask_hash"] != other_ledger["mask_hash"]
    for name, fracs in (("random", (0.0, 1.0)), ("kept", (0.0, 0.0))):
        _, ledger = run(0, *fracs)
        assert ledger[f"num_{name}_tokens"] == 8 * NUM_ROWS
