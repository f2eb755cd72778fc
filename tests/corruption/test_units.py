"""Units: what is hidden as a whole, and how long spans are."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax.corruption import units
from mlm_jax.data import sources
from mlm_jax.data.tokenizer import Tokenizer
from tests.corruption.helpers import (
    STRATEGIES,
    assert_proportional,
    begins_word,
    corrupt,
    hidden,
    is_maskable,
    numbers,
    packed_batch,
    some_collocations,
)
from tests.helpers import CLS, PAD, SEP, UNK, make_batch, make_corrupt


@functools.cache
def compile_partition(strategy):
    partition = units.make_partition(strategy, some_collocations())

    def of_rows(key, batch, is_maskable_BxL, hparams):
        keys = jax.random.split(key, len(is_maskable_BxL))
        return jax.vmap(partition, in_axes=(0, 0, 0, 0, None))(
            keys, batch["tokens"], batch["word_start"], is_maskable_BxL, hparams
        )

    return jax.jit(of_rows)


def partition(strategy, batch, seed=0, **lengths):
    """Returns int32[B, L]."""
    hparams = numbers(0.15, strategy=strategy, **lengths)
    key = jax.random.key(seed)
    return np.asarray(
        compile_partition(strategy)(key, batch, is_maskable(batch), hparams)
    )


# Two segments; [UNK] inside the first word of the second, and a row's end in a word.
TOKENS = [CLS, 5, 6, 7, 8, SEP, CLS, 9, UNK, 10, 11, 5, SEP, PAD, PAD, 6]
SEGMENT = [1] * 6 + [2] * 7 + [0, 0, 3]
STARTS = [0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]


def by_hand(strategy, **lengths):
    batch = make_batch([TOKENS], [SEGMENT], word_start=np.array([STARTS], bool))
    return partition(strategy, batch, **lengths)[0].tolist()


def test_units_by_hand():
    none = 16
    tokens = [none, 1, 2, 3, 4, none, none, 7, none, 9, 10, 11, none, none, none, 15]
    # A word's first token need not be marked where nothing goes before it.
    words = [none, 1, 1, 3, 3, none, none, 7, none, 9, 9, 11, none, none, none, 15]
    pairs = [none, 1, 1, 1, 1, none, none, 7, none, 9, 9, 9, none, none, none, 15]
    assert by_hand("token") == tokens
    assert by_hand("word") == words
    assert by_hand("span", span_lengths="uniform", span_min=1, span_max=1) == words
    assert by_hand("span", span_lengths="inverse", span_min=2, span_max=2) == pairs
    assert by_hand("span", span_min=16, span_max=16) == pairs
    assert by_hand("ngram", ngram_max=1) == words


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), longest=st.integers(1, 16))
def test_units_partition_the_maskable_tokens_into_whole_words(strategy, seed, longest):
    batch = packed_batch(seed, 64, 32)
    is_maskable_BxL = is_maskable(batch)
    lengths = {"span_min": 1, "span_max": longest, "ngram_max": longest}
    unit_BxL = partition(strategy, batch, seed, **lengths)
    np.testing.assert_array_equal(unit_BxL < 32, is_maskable_BxL)
    position_BxL = np.broadcast_to(np.arange(32), unit_BxL.shape)
    first_BxL = np.where(is_maskable_BxL, unit_BxL, position_BxL)

    # A run: a unit goes on right after itself, and its id is where it begins.
    is_first_BxL = is_maskable_BxL & (unit_BxL == position_BxL)
    goes_on_BxL = is_maskable_BxL & ~is_first_BxL
    assert not goes_on_BxL[:, 0].any()
    assert (unit_BxL[:, 1:] == unit_BxL[:, :-1])[goes_on_BxL[:, 1:]].all()
    # In one segment.
    of_first_BxL = np.take_along_axis(batch["segment"], first_BxL, 1)
    np.testing.assert_array_equal(of_first_BxL, batch["segment"])

    begins_word_BxL = begins_word(batch, is_maskable_BxL)
    if strategy == "token":
        np.testing.assert_array_equal(is_first_BxL, is_maskable_BxL)
        return
    if strategy == "word":
        np.testing.assert_array_equal(is_first_BxL, begins_word_BxL)
    # Words are never split, and no unit has too many.
    assert (is_first_BxL <= begins_word_BxL).all()
    word_BxL = np.cumsum(begins_word_BxL, 1)
    words_BxL = 1 + word_BxL - np.take_along_axis(word_BxL, first_BxL, 1)
    most = {"word": 1, "pmi": 3}.get(strategy, longest)
    assert words_BxL[is_maskable_BxL].max() <= most


# ---- lengths ------------------------------------------------------------------------

NUM_WORDS = 200


def span_lengths(strategy, **lengths):
    """Returns the words in each of the first 12 spans of 4,000 segments of 200 words.

    The first 12 of at most 16 words end before the segment does. The last span that is
    not cut would be no fair sample: a long one is cut more often.
    """
    # Words of one, two and three pieces.
    starts_L = np.tile(np.repeat([True, False, True, False, True], [1, 1, 1, 2, 1]), 67)
    starts_L = starts_L[: np.flatnonzero(starts_L)[NUM_WORDS]]
    batch = make_batch(np.full((4000, len(starts_L)), 5), word_start=starts_L[None, :])
    unit_BxL = partition(strategy, batch, **lengths)
    is_first_BxL = unit_BxL == np.arange(len(starts_L))
    word_L = np.cumsum(starts_L)
    order_BxL = np.argsort(~is_first_BxL, axis=1, kind="stable")
    return np.diff(word_L[order_BxL[:, :13]], axis=1)


def check_lengths(lengths_BxS, weights):
    counts = np.bincount(lengths_BxS.ravel(), minlength=17)
    assert len(counts) == 17
    assert_proportional(counts[1:], weights)
    # The law is that of every span: neither the first nor its successors differ, ...
    for spans_B in (lengths_BxS[:, 0], lengths_BxS[:, -1]):
        assert_proportional(np.bincount(spans_B, minlength=17)[1:], weights)
    # ... nor is a span's length a consequence of the one before.
    if (weights > 0).sum() > 1:
        correlation = np.corrcoef(lengths_BxS[:, 0], lengths_BxS[:, 1])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(len(lengths_BxS))


N = np.arange(1, 17)


@pytest.mark.parametrize(
    "lengths, weights",
    [
        # SpanBERT: a geometric law of p = 0.2, at most 10 words, the mean 3.8.
        ({}, np.where(N <= 10, 0.2 * 0.8 ** (N - 1), 0)),
        ({"span_p": 0.5, "span_min": 2, "span_max": 6}, (N >= 2) * (N <= 6) * 0.5**N),
        (
            {"span_lengths": "uniform", "span_min": 3, "span_max": 7},
            (N >= 3) & (N <= 7),
        ),
        ({"span_lengths": "uniform", "span_min": 1, "span_max": 16}, N > 0),
        ({"span_lengths": "inverse", "span_min": 1, "span_max": 4}, (N <= 4) / N),
        ({"span_min": 3, "span_max": 3}, N == 3),
        ({"span_min": 16, "span_max": 16}, N == 16),
    ],
)
def test_span_lengths_in_words_follow_their_law(lengths, weights):
    lengths_BxS = span_lengths("span", **lengths)
    check_lengths(lengths_BxS, weights)
    if not lengths:
        assert abs(lengths_BxS.mean() - 3.797) < 0.06


@pytest.mark.parametrize("longest", [1, 3, 10])
def test_ngrams_are_as_likely_as_one_over_their_length(longest):
    check_lengths(span_lengths("ngram", ngram_max=longest), (longest >= N) / N)


def test_a_segments_end_cuts_a_span_and_its_words_count_no_further():
    """Segments of two words under spans of three: each is one span."""
    tokens_L = [CLS, 5, 6, SEP] * 4
    batch = make_batch([tokens_L], [np.repeat([1, 2, 3, 4], 4)])
    unit_L = partition("span", batch, span_min=3, span_max=3)[0]
    assert unit_L.tolist() == [
        unit for n in range(4) for unit in (16, 4 * n + 1, 4 * n + 1, 16)
    ]


# ---- words of real tokenizers -------------------------------------------------------

TEXT = pathlib.Path(sources.__file__).parent / "austen" / "persuasion.txt"


@functools.cache
def trained(kind):
    return Tokenizer.train(
        [TEXT.read_text()[:50_000]],
        kind=kind,
        vocab_size=400,
        lowercase=True,
        strip_accents=True,
    )


@pytest.mark.parametrize("kind, marker", [("unigram", "▁"), ("bpe", "Ġ")])
def test_b07_words_of_metaspace_and_byte_level_pieces_are_hidden_whole(kind, marker):
    tokenizer = trained(kind)
    text = "unmasking Sir Walter is fun, said Elizabeth"
    encoded = tokenizer.encode([text])[0]
    pieces = [tokenizer.piece(id_) for id_ in encoded.tokens]
    assert not any("##" in piece or piece == "[UNK]" for piece in pieces)
    assert len(pieces) <= 30
    # By hand from the pieces, not from what the tokenizer says of them.
    begins = [n == 0 or p.startswith(marker) for n, p in enumerate(pieces)]
    assert sum(begins) == 7 and len(pieces) >= 12

    length = 32
    tokens_L = np.full(length, tokenizer.special.pad)
    framed = [tokenizer.special.cls, *encoded.tokens, tokenizer.special.sep]
    tokens_L[: len(framed)] = framed
    starts_L = np.zeros(length, bool)
    starts_L[1 : 1 + len(pieces)] = encoded.word_start
    batch = make_batch(
        np.tile(tokens_L, (1000, 1)),
        np.tile(np.arange(length) < len(framed), (1000, 1)),
        word_start=starts_L,
    )
    out, _ = jax.device_get(
        jax.jit(
            make_corrupt(
                strategy="word",
                count="bernoulli",
                num_slots=length,
                mask_id=tokenizer.special.mask,
                is_special_V=tokenizer.is_special,
            )
        )(jax.random.key(0), batch, numbers(0.3), 0.0)
    )
    is_hidden_BxT = hidden(out)[:, 1 : 1 + len(pieces)]
    np.testing.assert_array_equal(
        out["inputs"][:, 1 : 1 + len(pieces)] == tokenizer.special.mask, is_hidden_BxT
    )
    for n in range(1, len(pieces)):
        together = (is_hidden_BxT[:, n] == is_hidden_BxT[:, n - 1]).all()
        # Whether a comma is a word of its own is the pre-tokenizer's affair.
        if pieces[n] != ",":
            assert together != begins[n], pieces[n - 1 : n + 1]


def test_hiding_by_words_hides_whole_words_end_to_end():
    batch = packed_batch(0, 64, 32)
    out, _ = corrupt(batch, numbers(0.5), strategy="word", num_slots=32)
    is_hidden_BxL, is_maskable_BxL = hidden(out), is_maskable(batch)
    goes_on_BxL = is_maskable_BxL & ~begins_word(batch, is_maskable_BxL)
    assert goes_on_BxL.sum() > 100
    same_BxL = is_hidden_BxL[:, 1:] == is_hidden_BxL[:, :-1]
    assert same_BxL[goes_on_BxL[:, 1:]].all()
    assert not same_BxL[~goes_on_BxL[:, 1:]].all()
