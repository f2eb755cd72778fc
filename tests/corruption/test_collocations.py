"""Collocations as units: one hash on host and device, and what a row's units are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax.corruption import collocations, units
from mlm_jax.corruption.collocations import MAX_WORDS
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError

CLS, SEP, PAD = 2, 3, 0
LENGTH = 24


def make_list(*entries, padded=8):
    """Returns the collocations; an entry is words, a word its pieces."""
    hashes = [
        collocations.hash_ngrams(
            np.concatenate([word_hash(word) for word in words])[None]
        )
        for words in entries
    ]
    found = collocations.from_hashes(np.concatenate(hashes))
    missing = padded - len(found.high_N)
    pad = functools.partial(np.pad, pad_width=(0, missing), constant_values=2**32 - 1)
    return found._replace(high_N=pad(found.high_N), low_N=pad(found.low_N))


def word_hash(pieces):
    return collocations.hash_words(np.array(pieces), np.arange(len(pieces)) == 0)


def make_row(*segments):
    """Returns tokens_L, word_start_L, is_maskable_L; a segment is words."""
    tokens, starts = [], []
    for words in segments:
        tokens += [CLS, *(piece for word in words for piece in word), SEP]
        starts += [False]
        starts += [rank == 0 for word in words for rank in range(len(word))] + [False]
    room = LENGTH - len(tokens)
    tokens_L = np.array(tokens + [PAD] * room, np.int32)
    return tokens_L, np.array(starts + [False] * room), tokens_L > 4


@jax.jit
def pmi_units(found, tokens_L, word_start_L, is_maskable_L):
    partition = units.make_partition("pmi", found)
    return partition(jax.random.key(0), tokens_L, word_start_L, is_maskable_L, {})


def unit_lengths(found, *segments):
    """Returns the lengths of a row's units in tokens, from left to right."""
    unit_L = np.array(pmi_units(found, *make_row(*segments)))
    return np.unique(unit_L[unit_L < LENGTH], return_counts=True)[1].tolist()


# ---- units --------------------------------------------------------------------------

A, B, C, D, E = [10, 11], [12], [13, 14, 15], [16], [17, 18]


def test_a_collocation_of_several_pieces_is_one_unit():
    found = make_list([A, C])
    assert unit_lengths(found, [B, A, C, D]) == [1, 5, 1]
    # The same pieces cut into other words are not it.
    assert unit_lengths(found, [B, [10, 11, 13], [14, 15]]) == [1, 3, 2]
    assert unit_lengths(found, [C, A]) == [3, 2]


def test_the_longest_match_wins():
    found = make_list([A, B], [A, B, C, D, E], [A, B, C], [B, C, D, E])
    assert unit_lengths(found, [A, B, C, D, E]) == [9]
    assert unit_lengths(found, [A, B, C, D]) == [6, 1]
    assert unit_lengths(found, [A, B, D]) == [3, 1]


def test_matches_are_greedy_from_left_to_right():
    found = make_list([A, B], [B, C, D])
    assert unit_lengths(found, [A, B, C, D]) == [3, 3, 1]
    assert unit_lengths(found, [B, C, D, A, B]) == [5, 3]
    assert unit_lengths(make_list([B, B]), [B] * 5) == [2, 2, 1]


def test_no_match_across_segments_or_special_tokens():
    found = make_list([A, B], [A, B, C])
    assert unit_lengths(found, [A], [B, C]) == [2, 1, 3]
    assert unit_lengths(found, [A, B], [C]) == [3, 3]
    mask = [4]  # a special token between words, as [UNK] is
    assert unit_lengths(found, [A, mask, B]) == [2, 1]
    assert unit_lengths(found, [A, B, mask, C]) == [3, 3]


def test_a_row_full_of_words_and_an_empty_one():
    found = make_list([B, B, B, B, B])
    full_L = np.full(LENGTH, B[0], np.int32), np.ones(LENGTH, bool)
    unit_L = pmi_units(found, *full_L, np.ones(LENGTH, bool))
    assert np.unique(unit_L).tolist() == [0, 5, 10, 15, 20, 21, 22, 23]
    none_L = np.array(pmi_units(found, *full_L, np.zeros(LENGTH, bool)))
    assert (none_L == LENGTH).all()


def test_another_list_of_the_same_padded_length_compiles_nothing():
    unit_lengths(make_list([A, B]), [A])
    before = pmi_units._cache_size()
    assert unit_lengths(make_list([C, D], [D, A]), [D, A]) == [3]
    assert pmi_units._cache_size() == before


WORD = st.sampled_from([[5], [6], [7], [5, 6], [8, 8]])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(WORD, min_size=1), min_size=1, max_size=2).filter(
        lambda row: sum(2 + sum(map(len, words)) for words in row) <= LENGTH
    ),
    st.lists(st.lists(WORD, min_size=2, max_size=MAX_WORDS), min_size=1, max_size=8),
)
def test_units_partition_the_row_into_the_words_of_a_plain_search(segments, entries):
    expected = []
    for words in segments:
        while words:
            sizes = range(min(MAX_WORDS, len(words)), 1, -1)
            n = next((n for n in sizes if words[:n] in entries), 1)
            expected.append(sum(map(len, words[:n])))
            words = words[n:]
    assert unit_lengths(make_list(*entries), *segments) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_units_partition_whatever_is_maskable_into_runs_of_whole_words(data):
    bools = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
    tokens_L = data.draw(
        st.lists(st.integers(5, 6), min_size=LENGTH, max_size=LENGTH).map(np.int32)
    )
    start_L, is_maskable_L = np.array(data.draw(bools)), np.array(data.draw(bools))
    found = make_list([[5], [6]], [[6], [5]], [[5], [5], [6]], [[6, 5], [5]])
    unit_L = np.array(pmi_units(found, tokens_L, start_L, is_maskable_L))
    assert ((unit_L < LENGTH) == is_maskable_L).all()
    for position in np.flatnonzero(is_maskable_L):
        first = unit_L[position]
        assert is_maskable_L[first : position + 1].all()  # one run
        if first == position:  # starts a word
            gap = position == 0 or not is_maskable_L[position - 1]
            assert gap or start_L[position]
        else:
            assert unit_L[position - 1] == first


# ---- the hash -----------------------------------------------------------------------


def test_host_and_device_hash_alike():
    rng = np.random.default_rng(0)
    tokens_L = rng.integers(5, 2**20, 500).astype(np.int32)
    start_L = rng.random(500) < 0.6
    start_L[0] = True
    word_L = np.cumsum(start_L) - 1
    everything_L = np.ones(500, bool)
    _, device = jax.jit(units._words)(tokens_L, word_L, start_L, everything_L)
    words_W = collocations.hash_words(tokens_L, start_L)
    for on_device, on_host in zip(device, collocations.split(words_W), strict=True):
        np.testing.assert_array_equal(on_device[: len(words_W)], on_host)
        ngram = jnp.asarray(on_host[:-1]), jnp.asarray(on_host[1:])
        np.testing.assert_array_equal(
            jax.jit(collocations.extend)(*ngram),
            collocations.extend(on_host[:-1], on_host[1:]),
        )


def test_order_and_bounds_of_words_tell_in_both_halves():
    texts = [[A, B, C], [C, B, A], [B, A, C], [A, B], [A, B, C, C], [A + B, C]]
    texts += [[[11, 10], B, C], [[10], [11], B, C], [A + B + C]]
    hashes = np.concatenate(
        [
            collocations.hash_ngrams(np.concatenate([*map(word_hash, words)])[None])
            for words in texts
        ]
    )
    for half in collocations.split(hashes):
        assert len(np.unique(half)) == len(texts)


def test_no_false_match_in_random_ngrams():
    """A list of 200,000, and 100,000 other n-grams of the same words: with 32 bits one
    would expect five matches."""
    rng = np.random.default_rng(0)
    tokens_T = rng.integers(5, 30_000, 900_000)
    words_W = collocations.hash_words(tokens_T, np.ones(len(tokens_T), bool))
    hashes = collocations.hash_ngrams(words_W.reshape(-1, 3))
    found = collocations.from_hashes(hashes[:200_000])
    assert found.size == 200_000
    member = jax.jit(units._is_member)
    assert not member(*collocations.split(hashes[200_000:]), found).any()
    assert member(*collocations.split(hashes[:100_000]), found).all()


def test_entries_that_share_their_high_bits_are_all_found():
    high, low = np.uint64(7) << np.uint64(32), np.arange(4, dtype=np.uint64)
    largest = np.array([2**64 - 1], np.uint64)  # like the padding
    found = collocations.from_hashes(np.concatenate([high + low, largest]))
    assert units._is_member(*collocations.split(high + low), found).all()
    assert units._is_member(*collocations.split(largest), found).all()
    others = np.concatenate([high + low + np.uint64(4), low])
    assert not units._is_member(*collocations.split(others), found).any()
    padded = collocations.from_hashes(high + np.arange(3, dtype=np.uint64))
    assert not units._is_member(*collocations.split(largest), padded).any()


# ---- files --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["wordpiece", "bpe", "unigram"])
def tokenizer(request):
    text = "a great deal of the great deal, my lady Catherine de Bourgh " * 20
    settings = dict(lowercase=False, strip_accents=False, vocab_size=300)
    return Tokenizer.train([text], kind=request.param, **settings)


def write(tmp_path, text):
    path = tmp_path / "list.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_list_finds_its_collocations_in_text(tmp_path, tokenizer):
    path = write(tmp_path, "# source = x\ngreat deal\r\n\nlady Catherine de Bourgh\n")
    found = collocations.load(path, tokenizer)
    assert found.size == 2
    (encoded,) = tokenizer.encode(["of a great deal of lady Catherine de Bourgh"])
    tokens_L = np.concatenate([[CLS], encoded.tokens, [SEP]]).astype(np.int32)
    start_L = np.concatenate([[False], encoded.word_start, [False]])
    unit_L = np.array(pmi_units(found, tokens_L, start_L, tokens_L > 4))
    word_L = np.cumsum(start_L)  # of a great deal …: 1 2 3 4
    firsts = [word_L[unit] for unit in np.unique(unit_L[1:-1])]
    assert firsts == [1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("great deal\nlady\n", "line 2: 'lady' is one word to this tokenizer"),
        ("# x\na a a a a a\n", "line 2: 'a a a a a a' is 6 words"),
        ("", "no collocation"),
        ("# only a comment\n\n", "no collocation"),
        (b"great deal\n\xff\xfe deal\n", "line 2: not UTF-8"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, tokenizer, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        collocations.load(path, tokenizer)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="none.txt: No such file"):
        collocations.load(tmp_path / "none.txt", tokenizer)


def test_a_line_that_cannot_be_met_is_left_out(tmp_path):
    tokenizer = Tokenizer.train(
        ["great deal " * 9],
        kind="wordpiece",
        vocab_size=99,
        lowercase=True,
        strip_accents=True,
    )
    found = collocations.load(write(tmp_path, "great deal\ngreat 世\n"), tokenizer)
    assert found.size == 1
    with pytest.raises(InputError, match="no collocation that this tokenizer"):
        collocations.load(write(tmp_path, "great 世\n"), tokenizer)
