"""Examples of a task -> rows of L tokens with targets.

A row is one segment, `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`: the encoder attends
within a segment, and has no token types to tell a from b by.

What is longer than a row: a text loses tokens at its end, the longer of a pair first; a
tagged sentence is divided between words, so that each word is tagged once; a context is
read in windows that overlap, after a question of at most half a row. What was cut is
counted.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mlm_jax.data.examples import Example, label_id
from mlm_jax.data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """An example's tokens. `places` are, for a context, where each piece begins and
    ends in characters, [T, 2]; for a tagged sentence the word of each piece, [T, 1]."""

    parts: tuple[np.ndarray, ...]
    places: np.ndarray | None


class TaskRows(NamedTuple):
    """Rows of a split.

    Attributes:
      columns: arrays [N, ...] for the step: tokens, segment and position int32[N, L],
        example int32[N] (the index of its example), weight float32[N] or [N, L], and
        target int32[N], float32[N], int32[N, L] or (start, end) int32[N, 2].
      places: int32[N, L, ...], as in Encoded, -1 where there is none; None without.
      num_cut: examples that did not fit into a row.
    """

    columns: dict[str, np.ndarray]
    places: np.ndarray | None
    num_cut: int

    @property
    def num_rows(self) -> int:
        return len(self.columns["example"])


def encode(
    kind: str, examples: Sequence[Example], tokenizer: Tokenizer
) -> list[Encoded]:
    """Returns the tokens of every example, unframed and uncut."""
    if kind == "tagging":
        return _encode_words(examples, tokenizer)
    columns = zip(*(example.texts for example in examples), strict=True)
    encoded = [tokenizer.encode_with_offsets(column) for column in columns]
    return [
        Encoded(
            tuple(tokens_T for tokens_T, _ in texts),
            texts[-1][1] if kind == "spans" else None,
        )
        for texts in zip(*encoded, strict=True)
    ]


def length_of(encoded: Encoded) -> int:
    """Returns the tokens of a row that would hold all of an example."""
    return sum(map(len, encoded.parts)) + len(encoded.parts) + 1


def lay(
    kind: str,
    examples: Sequence[Example],
    encoded: Sequence[Encoded],
    *,
    tokenizer: Tokenizer,
    row_length: int,
    stride: int,
    ids: Mapping[str, float],
) -> TaskRows:
    """Returns the rows of examples.

    Args:
      kind: of the task.
      examples: with their labels.
      encoded: their tokens, from `encode`.
      tokenizer: gives the special ids.
      row_length: L.
      stride: tokens from one window of a context to the next; less in short rows.
      ids: {label: id}; for a number {"mean": …, "deviation": …} of the training data.

    Raises:
      InputError: for a label that `ids` lacks.
    """
    rows: list[dict] = []
    num_cut = 0
    for number, (example, found) in enumerate(zip(examples, encoded, strict=True)):
        if kind == "tagging":
            new = list(_sentence_rows(example, found, row_length, ids))
        elif kind == "spans":
            new = list(_window_rows(example, found, row_length, stride))
        else:
            new = [_text_row(kind, example, found, row_length, ids)]
        num_cut += length_of(found) > row_length
        rows += [row | {"example": number} for row in new]
    return _stack(rows, tokenizer, row_length, num_cut)


def _encode_words(examples, tokenizer) -> list[Encoded]:
    """Words are joined by spaces, as byte-level vocabularies want to see them."""
    found = tokenizer.encode_with_offsets([" ".join(e.texts) for e in examples])
    encoded = []
    for example, (tokens_T, offsets_Tx2) in zip(examples, found, strict=True):
        ends = np.cumsum([len(word) + 1 for word in example.texts])  # after the space
        word_T = np.searchsorted(ends, offsets_Tx2[:, 1], side="left").astype(np.int32)
        # A word of which the tokenizer leaves nothing is unknown, and has a tag.
        lost = np.setdiff1d(np.arange(len(ends), dtype=np.int32), word_T)
        word_T = np.concatenate([word_T, lost])
        unknown = np.full(len(lost), tokenizer.special.unk, np.int32)
        order = np.argsort(word_T, kind="stable")
        tokens_T = np.concatenate([tokens_T, unknown])[order]
        encoded.append(Encoded((tokens_T,), word_T[order][:, None]))
    return encoded


def _text_row(kind, example, found, row_length, ids):
    parts = list(found.parts)
    room = row_length - len(parts) - 1
    while sum(map(len, parts)) > room:
        longest = max(range(len(parts)), key=lambda i: (len(parts[i]), i))
        parts[longest] = parts[longest][:-1]
    if kind == "classification":
        target = np.int32(label_id(example.label, ids, example.where))
    else:
        standard = (example.label - ids["mean"]) / ids["deviation"]
        target = np.float32(standard)  # type: ignore[assignment]
    return {"parts": parts, "target": target, "weight": np.float32(1)}


def _sentence_rows(example, found, row_length, ids):
    (tokens_T,), word_T = found.parts, found.places[:, 0]
    tags = [label_id(tag, ids, example.where) for tag in example.label]
    room = row_length - 2
    is_first_T = np.diff(word_T, prepend=-1) > 0
    starts = np.flatnonzero(is_first_T)
    begin = 0
    while begin < len(tokens_T):
        fitting = starts[(starts > begin) & (starts <= begin + room)]
        end = len(tokens_T)
        if end - begin > room and len(fitting):
            end = fitting[-1]
        elif end - begin > room:  # one word of more pieces than a row: the first ones
            after = starts[starts > begin]
            end = after[0] if len(after) else end
        piece = slice(begin, min(end, begin + room))
        places = word_T[piece]
        weight_T = is_first_T[piece].astype(np.float32)
        target_T = np.array([tags[word] for word in places], np.int32)
        yield {
            "parts": [tokens_T[piece]],
            "places": places[:, None],
            "target": np.pad(target_T, (1, row_length - 1 - len(places))),
            "weight": np.pad(weight_T, (1, row_length - 1 - len(places))),
        }
        begin = end


def _window_rows(example, found, row_length, stride):
    question, context = found.parts
    question = question[: row_length // 2 - 2]
    room = row_length - len(question) - 3
    stride = min(stride, max(room // 2, 1))  # or some answers would be in no window
    first = len(question) + 2  # of the context in a row
    begin = 0
    while True:
        window = slice(begin, begin + room)
        places = found.places[window]
        start, end = 0, 0
        if example.label:
            start, end = _answer_tokens(example.label[0], places)
            start, end = (start + first, end + first) if end >= start else (0, 0)
        yield {
            "parts": [question, context[window]],
            "places": places,
            "target": np.array([start, end], np.int32),
            "weight": np.float32(1),
        }
        if begin + room >= len(context):
            break
        begin += stride


def _answer_tokens(answer, places):
    """Returns first and last piece of an answer; last < first if the window lacks some
    of it."""
    stop = answer.start + len(answer.text)
    inside = (places[:, 1] > answer.start) & (places[:, 0] < stop)
    if not inside.any():
        return 0, -1
    first, last = np.flatnonzero(inside)[[0, -1]]
    # Whole at its beginning if the piece there reaches that far, or none comes before.
    is_whole = places[first, 0] <= answer.start and places[last, 1] >= stop
    return (int(first), int(last)) if is_whole else (0, -1)


def _stack(rows, tokenizer, row_length, num_cut):
    special = tokenizer.special
    shape = len(rows), row_length
    tokens = np.full(shape, special.pad, np.int32)
    segment = np.zeros(shape, np.int32)
    places = None
    if "places" in rows[0]:
        places = np.full(shape + rows[0]["places"].shape[1:], -1, np.int32)
    for n, row in enumerate(rows):
        framed = [np.array([special.cls], np.int32)]
        for part in row["parts"]:
            framed += [part, np.array([special.sep], np.int32)]
        tokens_T = np.concatenate(framed)
        tokens[n, : len(tokens_T)] = tokens_T
        segment[n, : len(tokens_T)] = 1
        if places is not None:  # of the last part
            end = len(tokens_T) - 1
            places[n, end - len(row["places"]) : end] = row["places"]
    position = np.arange(row_length, dtype=np.int32)[None] * segment
    names = "example", "target", "weight"
    columns = {name: np.stack([row[name] for row in rows]) for name in names}
    columns["example"] = columns["example"].astype(np.int32)
    columns |= {"tokens": tokens, "segment": segment, "position": position}
    return TaskRows(columns, places, num_cut)
