"""Mining: counts and measure against plain ones, what a list holds, and the command."""

import collections
import itertools
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mlm_jax.corruption import mining
from mlm_jax.corruption.collocations import load
from mlm_jax.data.packing import PackStats, pack
from mlm_jax.data.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).parents[2]


class Rows:
    """Documents packed in memory."""

    def __init__(self, texts, tokenizer, length=64, mode="packed"):
        settings = dict(length=length, special=tokenizer.special, mode=mode)
        encoded = tokenizer.encode(texts)
        self.rows = list(pack(encoded, stats=PackStats(), **settings))

    def __len__(self):
        return len(self.rows)

    def read(self, ids_N):
        rows = [self.rows[i] for i in ids_N]
        return {
            "tokens": np.stack([row.tokens for row in rows]),
            "word_start": np.stack([row.word_start for row in rows]),
        }


def train(texts, kind="wordpiece", vocab_size=400):
    settings = dict(vocab_size=vocab_size, lowercase=False, strip_accents=False)
    return Tokenizer.train(texts, kind=kind, **settings)


def mine(texts, tokenizer=None, *, length=64, mode="packed", **changes):
    tokenizer = tokenizer or train(texts)
    settings = dict(max_words=5, min_count=2, size=10_000, max_size=10_000, score="pmi")
    return mining.mine(
        Rows(texts, tokenizer, length, mode),
        tokenizer,
        log=lambda line: None,
        **settings | changes,
    )


def plain_counts(texts, max_words=5):
    """Returns a Counter of tuples of words for each n."""
    counts = {n: collections.Counter() for n in range(1, max_words + 1)}
    for words in map(str.split, texts):
        for n, counter in counts.items():
            counter.update(zip(*(words[i:] for i in range(n)), strict=False))
    return counts


def plain_pmi(counts, ngram):
    """The measure, over every way to cut an n-gram, in the order of its definition."""

    def log_p(words):
        return math.log(counts[len(words)][words] / counts[len(words)].total())

    n = len(ngram)
    values = []
    for cuts in itertools.product((False, True), repeat=n - 1):
        if any(cuts):
            bounds = [0, *(i + 1 for i in range(n - 1) if cuts[i]), n]
            pieces = [ngram[a:b] for a, b in itertools.pairwise(bounds)]
            values.append(log_p(ngram) - sum(map(log_p, pieces)))
    return min(values)


def random_texts(seed=0, documents=60):
    """Documents of few words, some of which like to be together."""
    rng = np.random.default_rng(seed)
    phrases = "great deal|lady catherine de bourgh|young man|of the|a|to|sir|and|she"
    phrases = np.array(phrases.split("|"))
    return [
        " ".join(rng.choice(phrases, rng.integers(0, 30))) for _ in range(documents)
    ]


# ---- the measure --------------------------------------------------------------------


def test_the_measure_by_hand():
    # 19 words: a 6, b 6, c 7; 10 bigrams: a b 6, b c 4; 4 trigrams, all a b c.
    texts = ["a b c"] * 4 + ["a b"] * 2 + ["c"] * 3
    found = mine(texts).found
    (ab, bc), (abc,) = found[2], found[3]
    assert (ab.text, ab.count, bc.text, bc.count) == ("a b", 6, "b c", 4)
    assert ab.pmi == pytest.approx(math.log(0.6 / (6 / 19 * 6 / 19)), rel=1e-12)
    assert bc.pmi == pytest.approx(math.log(0.4 / (6 / 19 * 7 / 19)), rel=1e-12)
    # Of a|bc, ab|c and a|b|c the second explains most: p(a b) p(c).
    assert (abc.text, abc.count) == ("a b c", 4)
    assert abc.pmi == pytest.approx(math.log(1 / (0.6 * 7 / 19)), rel=1e-12)


def test_counts_and_measure_are_the_plain_ones_for_every_length():
    texts = random_texts()
    counts = plain_counts(texts)
    found = mine(texts, length=4096, min_count=3).found
    for n in range(2, 6):
        expected = {
            " ".join(ngram): (count, plain_pmi(counts, ngram))
            for ngram, count in counts[n].items()
            if count >= 3
        }
        expected = {text: entry for text, entry in expected.items() if entry[1] > 1e-9}
        assert len(expected) > 10
        assert {entry.text for entry in found[n]} == set(expected)
        for entry in found[n]:
            assert entry.count == expected[entry.text][0]
            assert entry.pmi == pytest.approx(expected[entry.text][1], rel=1e-9)
        ranks = [entry.pmi for entry in found[n]]
        assert ranks == sorted(ranks, reverse=True)


def test_the_weighted_measure_adds_the_log_of_the_frequency():
    texts = random_texts()
    counts = plain_counts(texts)
    found = mine(texts, length=4096, score="weighted_pmi").found
    for n in (2, 3):
        scores = [
            entry.pmi + math.log(entry.count / counts[n].total()) for entry in found[n]
        ]
        assert scores == sorted(scores, reverse=True)
        assert scores != [entry.pmi for entry in found[n]]


# ---- what is counted ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["packed", "full", "single"])
def test_nothing_is_counted_across_documents(mode):
    found = mine(["a b", "c d"] * 10, mode=mode).found
    assert {entry.text for entry in found[2]} == {"a b", "c d"}
    assert not found[3]


def test_nothing_is_counted_across_a_row():
    # Rows of eight words.
    found = mine([" ".join("abcdefgh" * 5)], length=10).found
    assert "h a" not in {entry.text for entry in found[2]}
    assert {entry.count for entry in found[2]} == {5}


def test_no_special_token_is_in_a_collocation():
    tokenizer = train(["a b c"] * 3)
    found = mine(["a b 世 c a", "世 世"] * 10, tokenizer).found
    assert {entry.text for entry in found[2]} == {"a b", "c a"}
    assert not found[3]


def test_a_word_of_several_pieces_is_one_word():
    tokenizer = train(["abc cab bca"], vocab_size=11)  # letters only
    (encoded,) = tokenizer.encode(["abc cab"])
    assert len(encoded.tokens) == 6
    found = mine(["abc cab", "bca", "abc acb"] * 5, tokenizer).found
    assert {e.text: e.count for e in found[2]} == {"abc cab": 5, "abc acb": 5}
    assert not found[3]


def test_the_rest_of_a_word_that_a_row_cut_is_in_no_list():
    """Rows of six tokens cut abc into ab, a word as it stands, and ##c, no word."""
    tokenizer = train(["abc cab bca"], vocab_size=11)
    found = mine(["a b c a abc b", "a", "b"] * 9, tokenizer, length=8).found
    assert {e.text for e in found[2]} == {"a b", "b c", "c a", "a ab"}


# ---- the list -----------------------------------------------------------------------


def test_shares_of_the_lengths():
    mined = mine(random_texts(), size=40)
    assert [len(found) for found in mined.found.values()] == [20, 10, 5, 5]
    mined = mine(random_texts(), size=30, max_words=3)
    assert [len(found) for found in mined.found.values()] == [20, 10]
    everything = mine(random_texts(), max_words=3)
    for n, found in mined.found.items():
        assert found == everything.found[n][: len(found)]


def coverage(texts, found):
    """Returns the share of the words that are in an occurrence of an entry."""
    entries = {tuple(entry.text.split()) for list_ in found.values() for entry in list_}
    covered = total = 0
    for words in map(str.split, texts):
        places = set()
        for first, n in itertools.product(range(len(words)), range(2, 6)):
            ngram = tuple(words[first : first + n])
            if ngram in entries:
                places.update(range(first, first + len(ngram)))
        covered, total = covered + len(places), total + len(words)
    return covered / total


def test_by_default_half_of_the_words_are_part_of_a_collocation():
    texts = random_texts()
    mined = mine(texts, size=None, length=4096)
    assert mined.coverage == pytest.approx(coverage(texts, mined.found))
    assert mined.coverage >= 0.5
    smaller = mine(texts, size=mined.size - 1, length=4096)
    assert smaller.coverage == pytest.approx(coverage(texts, smaller.found))
    assert smaller.coverage < 0.5
    assert mine(texts, size=None, max_size=4, length=4096).size == 4


def test_the_same_list_however_the_rows_are_read(monkeypatch):
    texts = random_texts()
    first = mine(texts, length=16)
    assert mine(texts, length=16) == first
    monkeypatch.setattr(mining, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(mining, "CANDIDATES_AT_ONCE", 3)
    assert mine(texts, length=16) == first


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_list_loads_with_the_tokenizer_that_mined_it(tmp_path, kind):
    texts = random_texts() + ["# one, two; Mr. Darcy's  # one\n\nMr. Darcy's  two"] * 9
    tokenizer = train(texts, kind)
    found = mine(texts, tokenizer).found
    lines = [entry.text for entries in found.values() for entry in entries]
    assert {"great deal", "de bourgh", "lady catherine de bourgh"} <= set(lines)
    path = tmp_path / "list.txt"
    path.write_text("\n".join(["# settings", *lines]))
    assert load(path, tokenizer).size == len(lines) == len(set(lines))


def test_a_corpus_without_a_collocation_gives_an_empty_list():
    mined = mine(["a b c"], size=None)
    assert not any(mined.found.values())
    assert mined.coverage == 0


# ---- the command --------------------------------------------------------------------


def run(tmp_path, *arguments):
    (tmp_path / "text.txt").write_text("\n".join(random_texts(documents=300)))
    command = [sys.executable, "-m", "mlm_jax.mine_collocations", *arguments]
    command += [
        "--config=configs/tiny.py",
        f"--config.data.source=files:{tmp_path}/text.txt",
        f"--config.data.cache_dir={tmp_path}/cache",
        "--config.data.document=line",
        "--config.tokenizer.vocab_size=200",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_writes_a_list(tmp_path):
    path = tmp_path / "lists" / "collocations.txt"
    done = run(tmp_path, f"--output={path}", "--size=40", "--max_words=3")
    assert done.returncode == 0, done.stderr
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert f"# source = files:{tmp_path}/text.txt" in comments
    assert "# min_count = 10" in comments
    assert {"great deal", "lady catherine de"} <= set(lines[len(comments) :])
    assert "great deal" in done.stdout and "words are part of one" in done.stdout
    (tokenizer,) = (tmp_path / "cache").glob("tokenizers/*/tokenizer.json")
    assert load(path, Tokenizer.load(tokenizer)).size == len(lines) - len(comments)


def test_the_command_refuses_in_one_line(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--output=FILE is missing" in done.stderr
