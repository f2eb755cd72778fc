"""Rows give the documents back: nothing lost, doubled or out of order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax.data.packing import MIN_SEGMENT, MODES, PackStats, pack
from mlm_jax.data.tokenizer import Encoded, SpecialIds

PAD, UNK, CLS, SEP, MASK = SPECIAL = SpecialIds(3, 9, 7, 1, 5)
FIRST_TOKEN = 100

sizes = st.lists(st.integers(0, 60), max_size=12)
lengths = st.integers(8, 40)
modes = st.sampled_from(sorted(MODES))


def make_documents(sizes, word=3):
    """Returns documents of these sizes, every token of the corpus a different one."""
    ends = np.cumsum(sizes, dtype=int)
    return [
        Encoded(
            np.arange(end - size, end, dtype=np.int32) + FIRST_TOKEN,
            np.arange(size) % word == 0,
        )
        for size, end in zip(sizes, ends, strict=True)
    ]


def pack_all(documents, length, mode):
    stats = PackStats()
    packed = pack(documents, length=length, special=SPECIAL, mode=mode, stats=stats)
    return list(packed), stats


def segments(row):
    ends = np.cumsum(row.segment_lengths)
    return [row.tokens[end - n : end] for n, end in zip(row.segment_lengths, ends)]  # noqa: B905


@given(sizes, lengths, modes)
@settings(max_examples=150, deadline=None)
def test_ordinary_tokens_are_the_corpus(sizes, length, mode):
    documents = make_documents(sizes)
    rows, stats = pack_all(documents, length, mode)
    tokens = [row.tokens[row.tokens >= FIRST_TOKEN] for row in rows]
    expected = np.arange(sum(sizes)) + FIRST_TOKEN
    np.testing.assert_array_equal(np.concatenate([*tokens, []]), expected)
    assert (stats.documents, stats.tokens) == (len(sizes), sum(sizes))
    assert (stats.empty_documents, stats.rows) == (sizes.count(0), len(rows))
    used = sum(int(np.count_nonzero(row.tokens != PAD)) for row in rows)
    assert stats.fill == used / max(len(rows) * length, 1)


@given(sizes, lengths, modes)
@settings(max_examples=150, deadline=None)
def test_b14_rows_are_framed(sizes, length, mode):
    rows, _ = pack_all(make_documents(sizes), length, mode)
    for row in rows:
        used = int(row.segment_lengths.sum())
        assert row.tokens.shape == row.word_start.shape == (length,)
        assert row.tokens.dtype == row.segment_lengths.dtype == np.int32
        assert row.tokens[0] == CLS and row.tokens[used - 1] == SEP
        assert (row.tokens[used:] == PAD).all() and PAD not in row.tokens[:used]
        for segment in segments(row):
            assert segment[0] == CLS and segment[-1] == SEP
            assert len(segment) >= 3
            assert np.count_nonzero(segment == CLS) == 1


@given(sizes, lengths, modes)
@settings(max_examples=150, deadline=None)
def test_words_start_where_documents_say_and_at_segments(sizes, length, mode):
    documents = make_documents(sizes)
    starts = {
        token: start
        for document in documents
        for token, start in zip(*(a.tolist() for a in document), strict=True)
    }
    rows, _ = pack_all(documents, length, mode)
    for row in rows:
        for place, token in enumerate(row.tokens.tolist()):
            if token < FIRST_TOKEN:
                assert not row.word_start[place]
            elif row.tokens[place - 1] == CLS:
                assert row.word_start[place]
            else:
                assert row.word_start[place] == starts[token]


@given(sizes, lengths, st.sampled_from(["packed", "single"]))
@settings(max_examples=200, deadline=None)
def test_a_segment_is_one_documents(sizes, length, mode):
    documents = make_documents(sizes)
    owner = {t: n for n, d in enumerate(documents) for t in d.tokens.tolist()}
    rows, _ = pack_all(documents, length, mode)
    for row in rows:
        for segment in segments(row):
            assert len({owner[t] for t in segment[1:-1].tolist()}) == 1
            assert (segment[1:-1] >= FIRST_TOKEN).all()


@given(sizes, lengths)
@settings(max_examples=200, deadline=None)
def test_packed_rows_but_the_last_are_full(sizes, length):
    rows, _ = pack_all(make_documents(sizes), length, "packed")
    for row in rows[:-1]:
        assert length - row.segment_lengths.sum() < MIN_SEGMENT + 2


@given(sizes, lengths)
@settings(max_examples=200, deadline=None)
def test_full_rows_are_one_stream_with_separators(sizes, length):
    documents = make_documents(sizes)
    rows, _ = pack_all(documents, length, "full")
    for row in rows[:-1]:
        assert length - row.segment_lengths.sum() < 2
    for row in rows:
        assert len(row.segment_lengths) == 1
        body = row.tokens[1 : row.segment_lengths[0]]
        assert not ((body[1:] == SEP) & (body[:-1] == SEP)).any()
    # A document ends before every separator and nowhere else.
    last = {d.tokens[-1] for d in documents if len(d.tokens)}
    for row in rows:
        body = row.tokens[: row.segment_lengths[0] - 1]
        for token, after in zip(body[1:-1], body[2:], strict=True):
            assert (after == SEP) == (token in last)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("packed", [[16], [8], [9], [16], [16], [4]]),
        ("single", [[16], [8], [9], [16], [16], [4]]),
        ("full", [[16], [16], [16], [16], [4]]),
    ],
)
def test_b14_three_documents_by_hand(mode, expected):
    rows, stats = pack_all(make_documents([20, 7, 30]), 16, mode)
    assert [row.segment_lengths.tolist() for row in rows] == expected
    assert stats.fill == sum(n for (n,) in expected) / (16 * len(expected))


def test_several_short_documents_share_a_row():
    rows, _ = pack_all(make_documents([4, 5, 30, 2]), 32, "packed")
    assert [row.segment_lengths.tolist() for row in rows] == [[6, 7, 19], [15, 4]]


@pytest.mark.parametrize("mode", MODES)
def test_unknown_tokens_are_counted(mode):
    tokens = np.array([UNK, 100, UNK, 101], np.int32)
    _, stats = pack_all([Encoded(tokens, np.ones(4, bool))], 16, mode)
    assert (stats.unknown, stats.unknown_share) == (2, 0.5)
