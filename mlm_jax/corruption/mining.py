"""Mines the collocations of a corpus, for masking them as one unit.

After Levine et al., "PMI-Masking: Principled masking of correlated spans" (ICLR 2021),
and the notes published with its lists (github.com/AI21Labs/pmi-masking). As there:
word n-grams of 2 to 5 words that occur at least 10 times, ranked for each n by

    PMI_n(w) = min over segmentations s of w in 2 parts or more: log p(w) / prod p(s_i);

half of the list are bigrams, a quarter trigrams, an eighth each 4- and 5-grams; the
list is so long that about half of the corpus is part of a collocation, which there were
800,000 and is some 8,000 for six novels. Where the paper is silent:

- p of an n-gram is its share of all n-grams of that length.
- A word is what the tokenizer calls one, so punctuation is a word to most.
- Packed rows are counted, which training reads: n-grams across a row's end are not
  seen, and words cut there count as two. No special token, nor [UNK], is ever in one.
- An n-gram of PMI 0 or less is no collocation. A length that has too few is not made up
  for by others.

Memory: nothing grows with the length of the corpus but the number of different words,
and of different n-grams of one length whose parts are frequent; bigrams are the most,
at 100 to 200 bytes each. The rows are read from disk once a length, and once more.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mlm_jax.corruption import collocations
from mlm_jax.corruption.collocations import MIN_WORDS, hash_ngrams, hash_words
from mlm_jax.data.progress import Progress
from mlm_jax.data.tokenizer import Tokenizer

ROWS_AT_ONCE = 4096
CANDIDATES_AT_ONCE = 1 << 14
WEIGHTS = {2: 4, 3: 2, 4: 1, 5: 1}  # the paper's shares of the list
COVERED = 0.5  # of all words, the paper's


class RowReader(Protocol):
    """What is asked of `rows.Rows`."""

    def __len__(self) -> int: ...

    def read(self, ids_N: np.ndarray) -> dict[str, np.ndarray]: ...


class Text(NamedTuple):
    """Some rows' words that may be hidden, in order."""

    words_W: np.ndarray  # uint64: hashes
    run_W: np.ndarray  # int64: equal for words with nothing but words between them
    start_W: np.ndarray  # int64: the first token of each word
    tokens_T: np.ndarray


class Ngrams(NamedTuple):
    """Different n-grams of one length, by hash."""

    hash_N: np.ndarray  # uint64, ascending
    count_N: np.ndarray  # int64
    words_Nxn: np.ndarray  # uint64: the hashes of the words


class Counts(NamedTuple):
    """What a corpus has, by length of the n-gram."""

    frequent: dict[int, Ngrams]
    total: dict[int, int]  # occurrences of all n-grams, frequent or not


@dataclasses.dataclass(frozen=True)
class Collocation:
    text: str
    count: int
    pmi: float


@dataclasses.dataclass(frozen=True)
class Mined:
    """A list, best first for each n, and what to say of it."""

    found: dict[int, list[Collocation]]
    candidates: dict[int, int]
    words: int
    size: int  # what the shares are of; a length may have too few for its share
    coverage: float  # share of the words that are part of a collocation


def mine(
    rows: RowReader,
    tokenizer: Tokenizer,
    *,
    max_words: int,
    min_count: int,
    size: int | None,
    max_size: int,
    score: str,
    log: Callable[[str], object] = print,
) -> Mined:
    """Returns the collocations of rows; the same rows always give the same list.

    Args:
      rows: packed rows, read by id.
      tokenizer: that made them.
      max_words: the largest n, 2 to 5.
      min_count: occurrences that an n-gram needs.
      size: of the list. None: half of the words are part of a collocation.
      max_size: of the list where `size` is None.
      score: a key of `SCORES`, what n-grams of one length are ranked by.
      log: called with a line of progress about once a second.
    """
    corpus = Corpus(rows, tokenizer.is_special)
    counts = count(corpus, max_words=max_words, min_count=min_count, log=log)
    pieces = spell_words(corpus, counts.frequent[1].hash_N)
    longest = max_size if size is None else size
    shares = Shares(max_words)
    found, hashes, candidates = {}, {}, {}
    for n in range(MIN_WORDS, max_words + 1):
        ranked, pmi_N = rank(counts, n, SCORES[score])
        candidates[n] = len(pmi_N)
        kept_N, texts = _spell(ranked, pieces, tokenizer, shares.length(n, longest))
        hashes[n] = ranked.hash_N[kept_N]
        columns = texts, ranked.count_N[kept_N].tolist(), pmi_N[kept_N].tolist()
        found[n] = [Collocation(*fields) for fields in zip(*columns, strict=True)]
    covered_S = count_covered(corpus, hashes, shares, longest, log)
    words = counts.total[1]
    if size is None:
        size = int(np.searchsorted(covered_S[:-1], COVERED * words))
    for n, entries in found.items():
        del entries[shares.length(n, size) :]
    return Mined(found, candidates, words, size, int(covered_S[size]) / max(words, 1))


class Shares:
    """How a list is divided between the lengths of n-grams."""

    def __init__(self, max_words: int):
        self._all = sum(WEIGHTS[n] for n in range(MIN_WORDS, max_words + 1))

    def length(self, n: int, size: int) -> int:
        """Returns the n-grams in a list of `size`."""
        return size * WEIGHTS[n] // self._all

    def size(self, n: int, length_N: np.ndarray) -> np.ndarray:
        """Returns the smallest size of a list with that many n-grams."""
        return -(-length_N * self._all // WEIGHTS[n])


class Corpus:
    """The words of all rows; each iteration reads them anew."""

    def __init__(self, rows: RowReader, is_special_V: np.ndarray):
        self._rows, self._is_special_V = rows, is_special_V

    def __iter__(self) -> Iterator[Text]:
        for ids in itertools.batched(range(len(self._rows)), ROWS_AT_ONCE):
            batch = self._rows.read(np.array(ids))
            yield read_text(batch["tokens"], batch["word_start"], self._is_special_V)


def read_text(tokens_BxL, word_start_BxL, is_special_V) -> Text:
    """Returns the words of rows, as `units` finds them."""
    is_maskable_BxL = ~is_special_V[tokens_BxL]
    follows_a_gap_BxL = np.ones_like(is_maskable_BxL)
    follows_a_gap_BxL[:, 1:] = ~is_maskable_BxL[:, :-1]
    run_BxL = np.cumsum(~is_maskable_BxL).reshape(tokens_BxL.shape)
    run_BxL += np.arange(len(tokens_BxL))[:, None]  # a run ends with its row
    tokens_T, run_T, is_start_T = (
        values_BxL[is_maskable_BxL]
        for values_BxL in (tokens_BxL, run_BxL, word_start_BxL | follows_a_gap_BxL)
    )
    start_W = np.flatnonzero(is_start_T)
    return Text(hash_words(tokens_T, is_start_T), run_T[start_W], start_W, tokens_T)


def count(corpus: Iterable[Text], *, max_words: int, min_count: int, log) -> Counts:
    """Counts the n-grams that occur `min_count` times; all of their parts do too."""
    counts = Counts({}, {})
    for n in range(1, max_words + 1):
        tally = Tally(n)
        progress = Progress(log, f"counting {n}-grams" if n > 1 else "counting words")
        total = done = 0
        for text in corpus:
            is_inside_N, words_Nxn = windows(text, n)
            total += int(is_inside_N.sum())
            if n > 1:
                is_inside_N &= _has_frequent_parts(text, counts.frequent[n - 1])
            tally.add(words_Nxn[is_inside_N])
            done += len(text.words_W)
            if progress.is_due():
                progress.report(words=done)
        ngrams = tally.merged()
        is_frequent_N = ngrams.count_N >= min_count
        counts.frequent[n] = Ngrams(*(field[is_frequent_N] for field in ngrams))
        counts.total[n] = total
    return counts


def windows(text: Text, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns every n words in a row, and whether they are in one run."""
    if len(text.words_W) < n:
        return np.zeros(0, bool), np.zeros((0, n), np.uint64)
    last_N = text.run_W[n - 1 :]
    is_inside_N = text.run_W[: len(last_N)] == last_N
    return is_inside_N, np.lib.stride_tricks.sliding_window_view(text.words_W, n)


def _has_frequent_parts(text: Text, shorter: Ngrams) -> np.ndarray:
    _, words = windows(text, shorter.words_Nxn.shape[1])
    is_frequent = find(hash_ngrams(words), shorter.hash_N) >= 0
    return is_frequent[:-1] & is_frequent[1:]


def find(hash_, table_N):
    """Returns the place of each hash in an ascending table, -1 where it is not in."""
    if not len(table_N):
        return np.full(hash_.shape, -1)
    place = np.minimum(np.searchsorted(table_N, hash_), len(table_N) - 1)
    return np.where(table_N[place] == hash_, place, -1)


class Tally:
    """Counts n-grams; what was added since the last merge is at most as much as it."""

    def __init__(self, n: int):
        nothing = np.zeros(0, np.uint64)
        self._merged = Ngrams(nothing, np.zeros(0, np.int64), nothing.reshape(0, n))
        self._added: list[Ngrams] = []

    def add(self, words_Nxn: np.ndarray) -> None:
        hash_N, first_N, count_N = np.unique(
            hash_ngrams(words_Nxn), return_index=True, return_counts=True
        )
        self._added.append(Ngrams(hash_N, count_N, words_Nxn[first_N]))
        if sum(len(part.hash_N) for part in self._added) > len(self._merged.hash_N):
            self.merged()

    def merged(self) -> Ngrams:
        parts = zip(self._merged, *self._added, strict=True)
        hash_N, count_N, words_Nxn = (np.concatenate(fields) for fields in parts)
        order_N = np.argsort(hash_N, kind="stable")
        hash_N = hash_N[order_N]
        is_first_N = np.diff(hash_N, prepend=~hash_N[:1]) != 0
        first_N = np.flatnonzero(is_first_N)
        if len(first_N):
            count_N = np.add.reduceat(count_N[order_N], first_N)
        words_Nxn = words_Nxn[order_N[first_N]]
        self._merged = Ngrams(hash_N[first_N], count_N, words_Nxn)
        self._added = []
        return self._merged


def pmi(log_p):
    """Equation 3 of the paper. `log_p[i, j]` is float64[N]: of words i to j - 1."""
    n = max(end for _, end in log_p)
    # The best segmentation of the first words ends with some piece.
    best = [np.zeros_like(log_p[0, n])]
    for end in range(1, n + 1):
        pieces = [(start, end) for start in range(end) if (start, end) != (0, n)]
        ways = [best[start] + log_p[start, end] for start, end in pieces]
        best.append(np.max(ways, axis=0))
    return log_p[0, n] - best[n]


def weighted_pmi(log_p):
    """With p(w) squared, which favours frequent n-grams: as the published lists are."""
    return pmi(log_p) + log_p[0, max(end for _, end in log_p)]


SCORES = {"pmi": pmi, "weighted_pmi": weighted_pmi}


def rank(counts: Counts, n: int, score: Callable) -> tuple[Ngrams, np.ndarray]:
    """Returns the n-grams of PMI above 0, best first, and their PMI."""
    ngrams = counts.frequent[n]
    log_p = {}
    for start, end in itertools.combinations(range(n + 1), 2):
        parts = counts.frequent[end - start]
        place_N = find(hash_ngrams(ngrams.words_Nxn[:, start:end]), parts.hash_N)
        count_N = parts.count_N[place_N] if len(place_N) else np.zeros(0)
        log_p[start, end] = np.log(count_N / counts.total[end - start])
    pmi_N = pmi(log_p)
    # Of equal scores the more frequent one, of equal counts the smaller hash.
    order_N = np.lexsort((ngrams.hash_N, -ngrams.count_N, -score(log_p)))
    order_N = order_N[pmi_N[order_N] > 0]
    return Ngrams(*(field[order_N] for field in ngrams)), pmi_N[order_N]


def spell_words(corpus: Iterable[Text], hash_N) -> dict[int, np.ndarray]:
    """Returns the tokens of the words of these hashes."""
    pieces: dict[int, np.ndarray] = {}
    for text in corpus:
        found_M, first_M = np.unique(text.words_W, return_index=True)
        is_wanted_M = find(found_M, hash_N) >= 0
        end_W = np.append(text.start_W[1:], len(text.tokens_T))
        for hash_, w in zip(found_M[is_wanted_M], first_M[is_wanted_M], strict=True):
            if int(hash_) not in pieces:
                word_T = text.tokens_T[text.start_W[w] : end_W[w]]
                pieces[int(hash_)] = word_T.copy()  # not a view of all the text
    return pieces


def _spell(ranked: Ngrams, pieces, tokenizer: Tokenizer, most: int):
    """Returns the first `most` n-grams that a line of text can give, and the lines.

    The rest of a word that a row cut cannot be given, nor the blanks and line ends that
    are words to a byte-level vocabulary.
    """
    kept: list[int] = []
    texts: list[str] = []
    for first in range(0, len(ranked.hash_N), CANDIDATES_AT_ONCE):
        if len(kept) >= most:
            break
        words = ranked.words_Nxn[first : first + CANDIDATES_AT_ONCE].tolist()
        ngrams = [[pieces[word] for word in ngram] for ngram in words]
        for place, text in enumerate(_lines(ngrams, tokenizer), first):
            if text is not None:
                kept.append(place)
                texts.append(text)
    return np.array(kept[:most], np.int64), texts[:most]


def _lines(ngrams: Sequence[Sequence[np.ndarray]], tokenizer) -> list[str | None]:
    """Returns for each n-gram a line with these words, None where there is none."""
    # Spaces between words first; byte-level vocabularies need the text as it was.
    spaced = [" ".join(tokenizer.decode(w).strip() for w in words) for words in ngrams]
    as_it_was = [tokenizer.decode(np.concatenate(words)).strip() for words in ngrams]
    found: list[str | None] = [None] * len(ngrams)
    for lines in (as_it_was, spaced):
        for place, encoded in enumerate(collocations.encode(lines, tokenizer)):
            if _is_line(lines[place]) and _is_same(encoded, ngrams[place]):
                found[place] = lines[place]
    return found


def _is_line(text: str) -> bool:
    """Whether a file gives it back as it is."""
    return text == text.strip() and not text.startswith("#") and "\n" not in text


def _is_same(encoded, words: Sequence[np.ndarray]) -> bool:
    is_start_T = np.concatenate([np.arange(len(word)) == 0 for word in words])
    return np.array_equal(encoded.tokens, np.concatenate(words)) and np.array_equal(
        encoded.word_start, is_start_T
    )


def count_covered(corpus: Iterable[Text], hashes, shares: Shares, longest: int, log):
    """Returns int64[S]: the words that a list of each size from 0 to `longest` covers.

    `hashes[n]` are n-grams, best first.
    """
    tables = {}
    for n, hash_N in hashes.items():
        order_N = np.argsort(hash_N)
        tables[n] = hash_N[order_N], shares.size(n, order_N + 1)
    words_S = np.zeros(longest + 1, np.int64)
    progress, done = Progress(log, "counting covered words"), 0
    for text in corpus:
        size_W = _smallest_sizes(text, tables, longest + 1)
        words_S += np.bincount(size_W, minlength=longest + 2)[:-1]
        done += len(size_W)
        if progress.is_due():
            progress.report(words=done)
    return np.cumsum(words_S)


def _smallest_sizes(text: Text, tables, never: int):
    """Returns int64[W]: from what size of the list on each word is part of an entry."""
    size_W = np.full(len(text.words_W), never)
    for n, (hash_N, size_N) in tables.items():
        is_inside, words = windows(text, n)
        place = find(hash_ngrams(words), hash_N)
        size = np.full(len(place), never)
        is_entry = is_inside & (place >= 0)
        size[is_entry] = size_N[place[is_entry]]
        for offset in range(n):
            covered = size_W[offset : offset + len(size)]
            np.minimum(covered, size, out=covered)
    return size_W
