"""Ids, word starts and special tokens of every kind of vocabulary."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mlm_jax.data.tokenizer import KINDS, SPECIAL_TOKENS, Tokenizer
from mlm_jax.errors import InputError

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "bert_tokenizer.json"
TEXT = [
    "the masked word is hidden, and the other words are seen.",
    "Hiding words [MASK] the model reads ([MASK]) both sides; masks hide.",
    "caf\u00e9 na\u00efve m\u00f6chte mochte Stra\u00dfe.",
] * 3


def train(
    kind="wordpiece", vocab_size=400, lowercase=True, strip_accents=True, text=TEXT
):
    switches = {"lowercase": lowercase, "strip_accents": strip_accents}
    return Tokenizer.train(text, kind=kind, vocab_size=vocab_size, **switches)


def ids(tokenizer, text):
    return tokenizer.encode([text])[0].tokens.tolist()


def pieces(tokenizer, text):
    return [tokenizer.piece(i) for i in ids(tokenizer, text)]


def vocab_file(path, entries, **switches):
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    switches = {"lowercase": True, "strip_accents": True} | switches
    return Tokenizer.from_file(path, **switches)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_take_the_first_ids(kind):
    tokenizer = train(kind)
    assert tokenizer.special == (0, 1, 2, 3, 4)
    assert [tokenizer.piece(i) for i in range(5)] == list(SPECIAL_TOKENS)
    assert np.flatnonzero(tokenizer.is_special).tolist() == [0, 1, 2, 3, 4]
    assert tokenizer.is_special.shape == (tokenizer.vocab_size,)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_starts_words_and_decodes(kind):
    tokenizer = train(kind)
    encoded = tokenizer.encode(["the masked words", "hide"])[0]
    assert encoded.tokens.dtype == np.int32 and encoded.word_start.dtype == bool
    assert len(encoded.tokens) == len(encoded.word_start)
    assert encoded.word_start.sum() == 3 and encoded.word_start[0]
    assert tokenizer.decode(encoded.tokens) == "the masked words"


@pytest.mark.parametrize("kind", KINDS)
def test_word_starts_follow_the_word_not_the_spelling(kind):
    tokenizer = train(kind)
    whole, word_start = tokenizer.encode(["hidden hidden"])[0]
    (first, second) = np.flatnonzero(word_start)
    assert first == 0
    assert tokenizer.decode(whole[second:]).strip() == "hidden"


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_has_no_tokens(kind):
    encoded = train(kind).encode([""])[0]
    assert encoded.tokens.shape == encoded.word_start.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_keep_ids_and_digest(kind, tmp_path):
    tokenizer = train(kind)
    path = tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(path)
    assert loaded.digest == tokenizer.digest
    assert loaded.special == tokenizer.special
    for text in TEXT:
        assert ids(loaded, text) == ids(tokenizer, text)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_training_is_the_same_in_every_process(kind):
    # Unigram is not: the library sums its scores in the order of a hash map.
    code = f"""
from mlm_jax.data import tokenizer
from tests import texts
documents = list(texts.documents(
    "bundled:austen", document="file", on_bad_text="stop", data_dir=None))[:15]
print(tokenizer.Tokenizer.train(documents, kind={kind!r}, vocab_size=1000,
      lowercase=True, strip_accents=True).digest)
"""
    digests = set()
    for seed, threads in (("1", "1"), ("2", "4")):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            check=True,
        )
        digests.add(found.stdout)
    assert len(digests) == 1


def test_wordpiece_learns_the_same_from_an_iterator():
    assert train(text=iter(TEXT)).digest == train(text=TEXT).digest


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_corpus_gives_a_small_vocabulary(kind):
    assert 5 < train(kind, vocab_size=8192).vocab_size < 8192


@pytest.mark.parametrize(
    "kind, size, message",
    [
        ("wordpeice", 400, "wordpiece, bpe, unigram"),
        ("wordpiece", 16, "alphabet alone"),
    ],
)
def test_what_cannot_be_trained_is_refused(kind, size, message):
    with pytest.raises(InputError, match=message):
        train(kind, vocab_size=size)


# The pieces of `m\u00f6chte` in composed and decomposed form, all four switches.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip", [True, False])
def test_b24_lowercase_and_accents_are_separate(kind, lowercase, strip):
    tokenizer = train(kind, lowercase=lowercase, strip_accents=strip)
    umlaut = ids(tokenizer, "m\u00f6chte")
    assert (umlaut == ids(tokenizer, "mochte")) == strip
    assert umlaut == ids(tokenizer, "mo\u0308chte")
    assert ids(tokenizer, "caf\u00e9") == ids(tokenizer, "cafe\u0301")
    assert (ids(tokenizer, "THE") == ids(tokenizer, "the")) == lowercase
    assert tokenizer.special.unk not in umlaut


def test_b25_same_ids_as_bert(tmp_path):
    fixture = json.loads(FIXTURE.read_text())
    tokenizer = vocab_file(tmp_path / "vocab.txt", fixture["vocab"])
    cases = fixture["cases"]
    assert len(cases) == 1000
    # Two differences, both of the library's Unicode tables. Code points that are not
    # assigned are dropped by BERT's own code as if they were control characters, and
    # kept here, as a part of an unknown word. The first 256 ideographs of extension E
    # are set apart by BERT and not here. Written so that neither shows, the same
    # strings agree.
    mended = [
        text.replace("\ufffe", "")
        .replace("\u0378", "")
        .replace("\U0002b821", " \U0002b821 ")
        for text, _ in cases
    ]
    assert sum(a != b for a, (b, _) in zip(mended, cases, strict=True)) < 80
    for (text, expected), encoded in zip(cases, tokenizer.encode(mended), strict=True):
        assert encoded.tokens.tolist() == expected, ascii(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [True, False])
def test_b26_typed_special_tokens_stay_text(kind, lowercase):
    text = [
        *TEXT,
        *[f"{token} {token[1:-1]} ({token})" for token in SPECIAL_TOKENS] * 9,
    ]
    tokenizer = train(kind, lowercase=lowercase, text=text)
    for token in SPECIAL_TOKENS:
        # Not even unknown: the characters are all there.
        assert min(ids(tokenizer, f"{token} the {token} ({token}){token}")) > 4, token


def test_b26_a_model_that_spells_a_special_token_does_not_get_it(tmp_path):
    path = tmp_path / "tokenizer.json"
    train("unigram", lowercase=False).save(path)
    saved = json.loads(path.read_text())
    saved["pre_tokenizer"] = saved["pre_tokenizer"]["pretokenizers"][0]
    path.write_text(json.dumps(saved))
    tokenizer = Tokenizer.load(path)
    assert tokenizer._library.model.token_to_id("[MASK]") == 4
    assert "[MASK]" in tokenizer._library.encode(" [MASK]").tokens
    found = ids(tokenizer, "the [MASK] and [PAD]")
    assert 1 in found and not set(found) & {0, 2, 3, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_b26_masks_are_read_where_they_are_asked_for(kind):
    tokenizer = train(kind)
    mask = tokenizer.special.mask
    encoded = tokenizer.encode_with_masks("the [MASK] words [MASK]. [mask] [PAD]")
    assert np.count_nonzero(encoded.tokens == mask) == 2
    assert encoded.word_start[encoded.tokens == mask].all()
    assert not set(encoded.tokens.tolist()) & {0, 2, 3}
    assert mask not in tokenizer.encode_with_masks("hello [mask] world").tokens
    assert tokenizer.encode_with_masks("[MASK]").tokens.tolist() == [mask]
    # The words around a mask are spelled as anywhere else.
    whole = ids(tokenizer, "the masked words")
    joined = tokenizer.encode_with_masks("the [MASK] words").tokens.tolist()
    assert [joined[0], joined[-1]] == [whole[0], whole[-1]]


def test_b28_a_word_of_100_characters_is_the_longest(tmp_path):
    entries = [*SPECIAL_TOKENS, "a", "##a"]
    tokenizer = vocab_file(tmp_path / "vocab.txt", entries)
    assert ids(tokenizer, "a" * 100) == [5] + [6] * 99
    assert ids(tokenizer, "a" * 101) == [tokenizer.special.unk]
    assert ids(tokenizer, "a" * 1_000_000) == [tokenizer.special.unk]


def test_b29_an_unseen_emoji_makes_the_word_unknown():
    tokenizer = train()
    assert pieces(tokenizer, "words\U0001f600 hide")[0] == "[UNK]"
    assert pieces(tokenizer, "words\U0001f600 hide")[1:] == pieces(tokenizer, "hide")
    # Bytes are never unknown.
    assert tokenizer.special.unk not in ids(train("bpe"), "words\U0001f600")


def test_b32_ids_are_looked_up(tmp_path):
    entries = "the [MASK] [UNK] [CLS] [SEP] word ##s [PAD]".split()
    tokenizer = vocab_file(tmp_path / "vocab.txt", entries)
    assert tokenizer.special == (7, 2, 3, 4, 1)
    assert not tokenizer.is_special[0]
    assert ids(tokenizer, "The words strange") == [0, 5, 6, 2]
    assert tokenizer.encode_with_masks("the [MASK]").tokens.tolist() == [0, 1]


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_b32_a_vocabulary_without_a_special_token_is_refused(tmp_path, missing):
    entries = [token for token in SPECIAL_TOKENS if token != missing] + ["a"]
    with pytest.raises(InputError, match=rf"vocab.txt lacks \{missing[:-1]}\]"):
        vocab_file(tmp_path / "vocab.txt", entries)


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.txt").write_bytes(b"\xff")
    for name, message in [
        ("x.json", "not a tokenizer.json"),
        ("x.txt", "not UTF-8"),
        ("none.txt", "not a file"),
    ]:
        with pytest.raises(InputError, match=message):
            Tokenizer.from_file(tmp_path / name, lowercase=True, strip_accents=True)


def test_other_special_tokens_of_a_file_count_as_special(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = train()
    tokenizer._library.add_special_tokens(["[EXTRA]"])
    tokenizer.save(path)
    loaded = Tokenizer.from_file(path, lowercase=True, strip_accents=True)
    assert loaded.is_special[-1] and loaded.is_special.sum() == 6
    assert loaded.vocab_size == tokenizer.vocab_size + 1
