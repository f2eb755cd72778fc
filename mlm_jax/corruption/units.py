"""What is hidden as a whole: a row's maskable tokens, partitioned into units.

A unit is a run of maskable tokens of one segment. Its id is the position of its first
token. Special tokens and padding belong to no unit.
"""

import functools

import jax
import jax.numpy as jnp

from mlm_jax.corruption.collocations import (
    MAX_WORDS,
    MIN_WORDS,
    PROBES,
    SEEDS,
    extend,
    piece_hash,
)


def make_partition(strategy, collocations=None):
    """Returns `partition(key, tokens_L, is_word_start_L, is_maskable_L, hparams)`. Its
    result is int32[L]: the start of each token's unit, L where there is none.

    Only `pmi` reads the `collocations.Collocations`, and only span and n-gram the table
    `length_cdf` of the hparams.
    """
    partition = STRATEGIES[strategy]
    if partition is pmi:
        return functools.partial(pmi, collocations=collocations)
    return partition


def token(key, tokens_L, is_word_start_L, is_maskable_L, hparams):
    """Each token is a unit."""
    del key, tokens_L, is_word_start_L, hparams
    return _unit_ids(is_maskable_L, is_maskable_L)


def word(key, tokens_L, is_word_start_L, is_maskable_L, hparams):
    """Each word is a unit, whatever the tokenizer: it says where words start."""
    del key, tokens_L, hparams
    is_start_L = is_word_start_L | _follows_a_gap(is_maskable_L)
    return _unit_ids(is_start_L & is_maskable_L, is_maskable_L)


def span(key, tokens_L, is_word_start_L, is_maskable_L, hparams):
    """Runs of words; each run draws its number of words from the table, and the end of
    its segment may cut it short."""
    del tokens_L
    draw_L = jax.random.uniform(key, is_maskable_L.shape)
    words_L = 1 + jnp.sum(
        draw_L[:, None] >= hparams["length_cdf"][None], axis=1, dtype=jnp.int32
    )
    is_new_word_L = is_word_start_L | _follows_a_gap(is_maskable_L)
    return _runs_of_words(words_L, is_new_word_L, is_maskable_L)


def pmi(key, tokens_L, is_word_start_L, is_maskable_L, hparams, *, collocations):
    """Collocations, the longest that starts here, from left to right; else words.

    The paper (Levine et al. 2021) prefers an entry to those inside it, and draws one
    of two that overlap; here the left one is taken, so that a row has one partition.
    """
    del key, hparams
    is_new_word_L = is_word_start_L | _follows_a_gap(is_maskable_L)
    words_L = _longest_matches(tokens_L, is_new_word_L, is_maskable_L, collocations)
    return _runs_of_words(words_L, is_new_word_L, is_maskable_L)


# Spans and n-grams differ only in their tables of lengths.
STRATEGIES = {"token": token, "word": word, "span": span, "ngram": span, "pmi": pmi}


def _follows_a_gap(is_maskable_L):
    """A word goes on only right after a token that may be hidden with it."""
    return ~jnp.roll(is_maskable_L, 1).at[0].set(False)


def _unit_ids(is_start_L, is_maskable_L):
    """Returns int32[L]: the start of each token's unit, L where there is none."""
    length = len(is_start_L)
    starts_L = jnp.where(is_start_L, jnp.arange(length), 0)
    return jnp.where(is_maskable_L, jax.lax.cummax(starts_L), length)


def _runs_of_words(words_L, is_new_word_L, is_maskable_L):
    """Returns the ids of units of `words_L` words each, read where the unit starts."""

    def step(words_left, token):
        is_maskable, is_new_word, words = token
        begins = is_maskable & is_new_word & (words_left == 0)
        words_left = jnp.where(begins, words, words_left) - is_new_word
        return jnp.where(is_maskable, words_left, 0), begins

    tokens = is_maskable_L, is_new_word_L, words_L
    _, is_start_L = jax.lax.scan(step, jnp.zeros_like(words_L, shape=()), tokens)
    return _unit_ids(is_start_L, is_maskable_L)


def _longest_matches(tokens_L, is_new_word_L, is_maskable_L, collocations):
    """Returns int32[L]: the words of the longest collocation that starts with the
    token's word, 1 where there is none."""
    is_start_L = is_new_word_L & is_maskable_L
    word_L = jnp.cumsum(is_start_L) - 1
    run_W, hashes_W = _words(tokens_L, word_L, is_start_L, is_maskable_L)
    grams, are_inside = [], []
    gram_W = hashes_W
    for n in range(MIN_WORDS, MAX_WORDS + 1):
        # Word w and the n - 1 after it; past the last word there is no run.
        gram_W = [
            extend(gram, _shift(hash_, n - 1))
            for gram, hash_ in zip(gram_W, hashes_W, strict=True)
        ]
        grams.append(jnp.stack(gram_W))
        are_inside.append(_shift(run_W, n - 1) == run_W)
    high_nxW, low_nxW = jnp.stack(grams, axis=1)
    is_match_nxW = jnp.stack(are_inside) & _is_member(high_nxW, low_nxW, collocations)
    n_n = jnp.arange(MIN_WORDS, MAX_WORDS + 1)
    longest_W = jnp.max(jnp.where(is_match_nxW, n_n[:, None], 1), axis=0)
    return longest_W[jnp.maximum(word_L, 0)].astype(jnp.int32)


def _words(tokens_L, word_L, is_start_L, is_maskable_L):
    """Returns `run_W`, the run of maskable tokens that each word is in (0: no word),
    and two hashes uint32[W]. A row has at most as many words as tokens: W is L."""
    position_L = jnp.arange(len(tokens_L))
    rank_L = position_L - jax.lax.cummax(jnp.where(is_start_L, position_L, 0))
    run_L = 1 + jnp.cumsum(~is_maskable_L)
    place_L = jnp.where(is_maskable_L, word_L, len(tokens_L))
    run_W = jnp.zeros_like(run_L).at[place_L].set(run_L, mode="drop")
    hashes_W = [
        jnp.zeros(len(tokens_L), jnp.uint32)
        .at[place_L]
        .add(piece_hash(tokens_L, rank_L, seed), mode="drop")
        for seed in SEEDS
    ]
    return run_W, hashes_W


def _shift(x_W, places):
    """Returns x_W[w + places], 0 past the end."""
    return jnp.pad(x_W, (0, places))[places:]


def _is_member(high, low, collocations):
    """Returns bool of the shape of `high`. Equal high bits are next to each other, so
    the first of them and the few after it are compared."""
    first = jnp.searchsorted(jnp.asarray(collocations.high_N), high)
    is_found = jnp.zeros(high.shape, bool)
    for place in (first + probe for probe in range(PROBES)):
        is_same = jnp.asarray(collocations.high_N)[place] == high
        is_same &= jnp.asarray(collocations.low_N)[place] == low
        is_found |= is_same & (place < collocations.size)
    return is_found
