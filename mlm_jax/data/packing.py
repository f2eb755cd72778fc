"""Documents to rows of L tokens. Nothing is ever dropped.

A segment is a document's part of a row. A word cut by the end of a row starts anew
in the next: the first ordinary token of a segment is always a word start.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mlm_jax.data.tokenizer import Encoded, SpecialIds

# A row is closed when fewer ordinary tokens than this would fit: shorter pieces of a
# document have no context to learn from.
MIN_SEGMENT = 8


class Row(NamedTuple):
    tokens: np.ndarray  # int32[L], [CLS] first, the last real one [SEP], then [PAD]
    segment_lengths: np.ndarray  # int32[S], framing included
    word_start: np.ndarray  # bool[L], False at special tokens


@dataclasses.dataclass
class PackStats:
    """Counts of what went into rows."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0  # ordinary ones
    unknown: int = 0  # of them [UNK]
    rows: int = 0
    filled: int = 0  # positions that are not padding
    positions: int = 0

    @property
    def fill(self) -> float:
        return self.filled / max(self.positions, 1)

    @property
    def unknown_share(self) -> float:
        return self.unknown / max(self.tokens, 1)


def pack(
    documents: Iterable[Encoded],
    *,
    length: int,
    special: SpecialIds,
    mode: str,
    stats: PackStats,
) -> Iterator[Row]:
    """Yields rows in document order and counts in `stats`.

    Args:
      documents: pieces without framing.
      length: L, at least 3.
      special: the ids to frame and pad with.
      mode: a key of `MODES`: `packed` (several segments a row, each [CLS] … [SEP]),
        `full` (one segment a row, documents separated by [SEP]) or `single` (one
        segment a row, padded).
      stats: filled while rows are read.
    """
    for row in MODES[mode](_counted(documents, special, stats), length, special):
        stats.rows += 1
        stats.positions += length
        stats.filled += int(row.segment_lengths.sum())
        yield row


def _counted(documents, special, stats) -> Iterator[Encoded]:
    for document in documents:
        stats.documents += 1
        stats.tokens += len(document.tokens)
        stats.unknown += int(np.count_nonzero(document.tokens == special.unk))
        if len(document.tokens):
            yield document
        else:
            stats.empty_documents += 1


class _Row:
    """A row being written."""

    def __init__(self, length: int, special: SpecialIds):
        self.special = special
        self.tokens_L = np.full(length, special.pad, np.int32)
        self.word_start_L = np.zeros(length, bool)
        self.lengths: list[int] = []
        self.used = 0

    def room(self) -> int:
        """Returns how many ordinary tokens fit into one more segment."""
        return len(self.tokens_L) - self.used - 2

    def put(self, token: int) -> None:
        self.tokens_L[self.used] = token
        self.used += 1

    def put_tokens(self, tokens_T: np.ndarray, word_start_T: np.ndarray) -> None:
        here = slice(self.used, self.used + len(tokens_T))
        self.tokens_L[here] = tokens_T
        self.word_start_L[here] = word_start_T
        self.word_start_L[self.used] = True
        self.used = here.stop

    def put_segment(self, tokens_T: np.ndarray, word_start_T: np.ndarray) -> None:
        self.put(self.special.cls)
        self.put_tokens(tokens_T, word_start_T)
        self.put(self.special.sep)
        self.lengths.append(len(tokens_T) + 2)

    def close(self) -> Row:
        lengths_S = np.array(self.lengths, np.int32)
        return Row(self.tokens_L, lengths_S, self.word_start_L)


def _packed(documents, length, special) -> Iterator[Row]:
    row = _Row(length, special)
    for tokens_T, word_start_T in documents:
        done = 0
        while done < len(tokens_T):
            if row.used and row.room() < MIN_SEGMENT:
                yield row.close()
                row = _Row(length, special)
            here = slice(done, done + row.room())
            row.put_segment(tokens_T[here], word_start_T[here])
            done = here.stop
    if row.used:
        yield row.close()


def _single(documents, length, special) -> Iterator[Row]:
    for tokens_T, word_start_T in documents:
        for start in range(0, len(tokens_T), length - 2):
            here = slice(start, start + length - 2)
            row = _Row(length, special)
            row.put_segment(tokens_T[here], word_start_T[here])
            yield row.close()


def _full(documents, length, special) -> Iterator[Row]:
    row = _Row(length, special)
    for tokens_T, word_start_T in documents:
        # A separator needs a token after it and the closing [SEP].
        if row.used and length - row.used < 3:
            yield _closed(row)
            row = _Row(length, special)
        row.put(special.sep if row.used else special.cls)
        done = 0
        while done < len(tokens_T):
            if row.used == length - 1:
                yield _closed(row)
                row = _Row(length, special)
                row.put(special.cls)
            here = slice(done, done + length - 1 - row.used)
            row.put_tokens(tokens_T[here], word_start_T[here])
            done = here.stop
    if row.used:
        yield _closed(row)


def _closed(row: _Row) -> Row:
    row.put(row.special.sep)
    row.lengths = [row.used]
    return row.close()


MODES: dict[str, Callable[..., Iterator[Row]]] = {
    "packed": _packed,
    "full": _full,
    "single": _single,
}
