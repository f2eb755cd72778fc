"""A list of collocations as two arrays that a device can search.

A collocation is known by 64 bits, two hashes of 32 from different seeds, because jax
has no 64-bit integers by default. Other words are taken for one of 800,000 with
probability 800,000 / 2^64 = 4e-14: once in 2e13 look-ups, a thousand epochs over
Wikipedia. So nothing is verified.

`piece_hash` and `extend` use operators only: NumPy and jax compute the same bits.
"""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mlm_jax.corruption.settings import MAX_COLLOCATION
from mlm_jax.data.tokenizer import Encoded, Tokenizer
from mlm_jax.errors import InputError

MIN_WORDS, MAX_WORDS = 2, MAX_COLLOCATION  # in a collocation
SEEDS = (np.uint32(0x9E3779B9), np.uint32(0xC2B2AE3D))  # any two: one a hash
# Entries that may share their high 32 bits. Of 800,000 some 75 pairs do, a triple in
# one list of 200, five in one of 1e11; the fifth would not be found.
PROBES = 4
LINES_AT_ONCE = 1 << 15  # what the tokenizer gives back is large


class Collocations(NamedTuple):
    """A sorted set of hashes; arrays only, so that it can be an argument of a compiled
    function, which fits all lists of one padded length."""

    high_N: np.ndarray  # uint32, ascending; N is a power of two
    low_N: np.ndarray  # uint32, ascending where `high_N` is equal
    size: np.ndarray  # int32 scalar: entries that count


def piece_hash(token, rank, seed):
    """Returns uint32: a piece and its place in its word. A word is the sum of its
    pieces, which a device adds up in any order."""
    return _mix(_mix(token.astype(np.uint32) + seed) + rank.astype(np.uint32) * _ODD)


def extend(hash_, word):
    """Returns uint32: the hash of words followed by one more; of one word, itself."""
    return _mix(hash_ * _ODD + word)


_ODD = np.uint32(0x9E3779B1)


def _mix(x):
    """The finaliser of MurmurHash3: every bit of x reaches every bit of the result."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def hash_words(tokens_T, is_start_T):
    """Returns uint64[W]: the words of a text, whose first token starts one."""
    start_W = np.flatnonzero(is_start_T)
    size_W = np.diff(start_W, append=len(tokens_T))
    rank_T = np.arange(len(tokens_T)) - np.repeat(start_W, size_W)
    return _join(
        *(
            np.add.reduceat(piece_hash(tokens_T, rank_T, seed), start_W, dtype="uint32")
            if len(start_W)
            else np.zeros(0, np.uint32)
            for seed in SEEDS
        )
    )


def hash_ngrams(words_NxW):
    """Returns uint64[N]: each row of hashes of words, as one hash."""
    first, *others = (split(words_N) for words_N in np.moveaxis(words_NxW, -1, 0))
    for word in others:
        first = tuple(map(extend, first, word))
    return _join(*first)


def split(hash_N):
    """Returns the two uint32[N] of a uint64[N]."""
    return (hash_N >> np.uint64(32)).astype(np.uint32), hash_N.astype(np.uint32)


def _join(high_N, low_N):
    return high_N.astype(np.uint64) << np.uint64(32) | low_N


def from_hashes(hash_N) -> Collocations:
    """Returns the set of uint64[N], padded to a power of two."""
    hash_N = np.unique(hash_N)
    padding = (1 << max(len(hash_N) - 1, 0).bit_length()) - len(hash_N)
    padded_N = np.pad(hash_N, (0, padding), constant_values=np.uint64(2**64 - 1))
    high_N, low_N = split(padded_N)
    return Collocations(high_N, low_N, np.array(len(hash_N), np.int32))


def encode(lines: Sequence[str], tokenizer: Tokenizer) -> list[Encoded]:
    """Returns the pieces of each line, as they are after a space."""
    # Byte-level vocabularies spell a word otherwise where no space is before it.
    return tokenizer.encode([f" {line}" for line in lines])


def load(path: str | pathlib.Path, tokenizer: Tokenizer) -> Collocations:
    """Reads a list: a collocation a line, comments from `#`.

    What the tokenizer calls a word is one, whatever spaces a line has. A line with an
    unknown piece is left out: [UNK] is never hidden, so it could not be met.

    Raises:
      InputError: no file, not UTF-8, a line that is not 2 to 5 words, no line at all.
    """
    hashes = [np.zeros(0, np.uint64)]
    for batch in itertools.batched(_read_lines(path), LINES_AT_ONCE):
        found = encode([line for _, line in batch], tokenizer)
        for (number, line), encoded in zip(batch, found, strict=True):
            words = int(encoded.word_start.sum())
            if not MIN_WORDS <= words <= MAX_WORDS:
                count = "one word" if words == 1 else f"{words} words"
                raise InputError(
                    f"{path}, line {number}: {line!r} is {count} to this tokenizer; a"
                    f" collocation is {MIN_WORDS} to {MAX_WORDS}."
                )
        hashes.append(_hash_lines(found, tokenizer.is_special))
    collocations = from_hashes(np.concatenate(hashes))
    if not collocations.size:
        raise InputError(f"{path}: no collocation that this tokenizer can spell.")
    return collocations


def _read_lines(path: str | pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields line number, from 1, and text."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig").strip()
                if text and not text.startswith("#"):
                    yield number, text
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: not UTF-8.") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}.") from error


def _hash_lines(lines: Sequence[Encoded], is_special_V) -> np.ndarray:
    """Returns uint64[N] of lines of different numbers of words."""
    lines = [line for line in lines if not is_special_V[line.tokens].any()]
    if not lines:
        return np.zeros(0, np.uint64)
    tokens_T, is_start_T = map(np.concatenate, zip(*lines, strict=True))
    words_W = hash_words(tokens_T, is_start_T)
    num_words_N = np.array([line.word_start.sum() for line in lines])
    first_N = np.cumsum(num_words_N) - num_words_N
    hash_N = np.zeros(len(lines), np.uint64)
    for n in range(MIN_WORDS, MAX_WORDS + 1):
        is_n_N = num_words_N == n
        hash_N[is_n_N] = hash_ngrams(words_W[first_N[is_n_N][:, None] + np.arange(n)])
    return hash_N
