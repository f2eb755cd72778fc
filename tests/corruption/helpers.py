"""Rows to corrupt, what a corrupted batch shows, and compiled policies."""

import functools

import jax
import numpy as np
from scipy import stats

from mlm_jax import keys
from mlm_jax.corruption import collocations, select, settings, units
from mlm_jax.corruption.replace import Action
from tests.helpers import (
    CLS,
    NUM_SPECIAL,
    PAD,
    SEP,
    UNK,
    corruption,
    make_batch,
    make_corrupt,
)

STRATEGIES = tuple(units.STRATEGIES)
COUNTS = tuple(select.COUNTS)
NUM_ROWS = 20_000  # one size where any will do: a batch of each compiles once a policy
VOCAB_SIZE = 12


def numbers(rate, min_predictions=1, mask_frac=1.0, random_frac=0.0, **changes):
    """Returns hparams; by default every hidden token becomes the mask."""
    return settings.hparams(
        corruption(
            rate=rate,
            min_predictions=min_predictions,
            mask_frac=mask_frac,
            random_frac=random_frac,
            **changes,
        )
    )


def some_collocations(seed=0):
    """Returns 40 of the pairs and 40 of the triples of words of one piece."""
    rng = np.random.default_rng(seed)
    tokens_NxW = rng.integers(NUM_SPECIAL, VOCAB_SIZE, (40, 5))
    is_start_N = np.ones(200, bool)
    words_NxW = collocations.hash_words(tokens_NxW.ravel(), is_start_N).reshape(40, 5)
    hashes = [
        collocations.hash_ngrams(words_NxW[:, part]) for part in ([0, 1], [2, 3, 4])
    ]
    return collocations.from_hashes(np.concatenate(hashes))


@functools.cache
def compile_corrupt(strategy="token", **policy):
    found = some_collocations() if strategy == "pmi" else None
    return jax.jit(
        make_corrupt(
            vocab_size=VOCAB_SIZE, strategy=strategy, collocations=found, **policy
        )
    )


def corrupt(batch, hparams, *, seed=0, progress=0.0, **policy):
    """Returns (batch, ledger) as NumPy arrays."""
    key = keys.purpose_key(jax.random.key(seed), keys.Purpose.CORRUPTION)
    progress = np.float32(progress)
    return jax.device_get(compile_corrupt(**policy)(key, batch, hparams, progress))


def ordinary_rows(num_rows, num_tokens, length=16, vocab_size=VOCAB_SIZE, seed=0):
    """Rows that start with `num_tokens` ordinary tokens; the rest is padding."""
    rng = np.random.default_rng(seed)
    tokens_BxL = rng.integers(NUM_SPECIAL, vocab_size, (num_rows, length))
    num_tokens_B = np.broadcast_to(num_tokens, num_rows)
    is_padding_BxL = np.arange(length)[None] >= num_tokens_B[:, None]
    return np.where(is_padding_BxL, PAD, tokens_BxL)


def packed_row(rng, length, is_special_V, special_ids):
    """Returns (tokens_L, segment_L): [CLS] … [SEP], again and again, then padding.
    Some tokens inside are special too."""
    ordinary_ids = np.flatnonzero(~is_special_V)
    pad, unk, cls, sep = special_ids[:4]
    tokens_L, segment_L = np.full(length, pad), np.zeros(length, int)
    start = segment = 0
    while length - start >= 2 and rng.random() < 0.9:
        size = int(rng.integers(2, length - start + 1))
        tokens_L[start] = cls
        inner = rng.choice(ordinary_ids, size - 2)
        tokens_L[start + 1 : start + size - 1] = np.where(
            rng.random(size - 2) < 0.05, unk, inner
        )
        tokens_L[start + size - 1] = sep
        segment += 1
        segment_L[start : start + size] = segment
        start += size
    return tokens_L, segment_L


def packed_batch(seed, num_rows, length, is_special_V=None, special_ids=None):
    """Returns a batch of packed rows. Where a word starts is random, also where there
    is no word."""
    if is_special_V is None:
        is_special_V = np.arange(VOCAB_SIZE) < NUM_SPECIAL
        special_ids = PAD, UNK, CLS, SEP
    rng = np.random.default_rng(seed)
    rows = [packed_row(rng, length, is_special_V, special_ids) for _ in range(num_rows)]
    tokens_BxL, segment_BxL = map(np.stack, zip(*rows, strict=True))
    return make_batch(
        tokens_BxL,
        segment_BxL,
        word_start=rng.random((num_rows, length)) < 0.6,
        epoch=rng.integers(0, 100, num_rows),
        row=rng.integers(0, 2**31, num_rows),
    )


def is_maskable(batch, special_ids=range(NUM_SPECIAL)):
    """Returns bool[B, L]."""
    return (batch["segment"] > 0) & ~np.isin(batch["tokens"], list(special_ids))


def begins_word(batch, is_maskable_BxL):
    """Returns bool[B, L]: a word starts where the tokenizer says, and after whatever
    may not be hidden."""
    follows_a_gap_BxL = np.ones_like(is_maskable_BxL)
    follows_a_gap_BxL[:, 1:] = ~is_maskable_BxL[:, :-1]
    return is_maskable_BxL & (batch["word_start"] | follows_a_gap_BxL)


def hidden(batch):
    """Returns bool[B, L]."""
    return batch["action"] != Action.NONE


def predicted(batch):
    """Returns bool[B, L]: the positions predicted, after checking the slots."""
    is_used_BxM = batch["weights"] > 0
    num_used_BxL = np.zeros(batch["tokens"].shape, int)
    row_B = np.arange(len(num_used_BxL))
    np.add.at(num_used_BxL, (row_B[:, None], batch["predict"]), is_used_BxM)
    # No position twice: it would count double in the loss.
    assert num_used_BxL.max() <= 1
    # Slots that are not in use are last and point at 0.
    assert (is_used_BxM[:, :-1] >= is_used_BxM[:, 1:]).all()
    assert (batch["predict"][~is_used_BxM] == 0).all()
    return num_used_BxL == 1


def assert_within(value, mean, deviation):
    """Five standard deviations: a right program fails once in two million."""
    assert abs(value - mean) < 5 * deviation, (value, mean, deviation)


def assert_uniform(counts):
    assert stats.chisquare(counts).pvalue > 0.001, counts


def assert_proportional(counts, weights):
    """Chi-square; where the weight is 0 there is nothing."""
    counts, weights = np.asarray(counts), np.asarray(weights, float)
    assert (counts[weights == 0] == 0).all()
    counts, weights = counts[weights > 0], weights[weights > 0]
    if len(counts) == 1:
        return
    expected = counts.sum() * weights / weights.sum()
    assert expected.min() >= 5
    assert stats.chisquare(counts, expected).pvalue > 0.001, (counts, expected)
