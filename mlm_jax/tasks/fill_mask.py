"""The most probable words where texts have [MASK]."""

from typing import NamedTuple

import numpy as np

from mlm_jax.errors import InputError
from mlm_jax.tasks.reader import Pieces, Rows


class Choice(NamedTuple):
    """What may stand at a [MASK]. `p` is a probability for a single piece, and a score
    from 0 to 1 for whole words."""

    text: str
    p: float


# How the log probabilities of a word's pieces make one score.
SCORES = {"mean": np.mean, "sum": np.sum}


def fill_mask(reader, texts, *, top=5, max_pieces=None, score="mean"):
    """Returns, for each text, for each of its [MASK]s, the best `Choice`s.

    Each text is one segment, and each [MASK] is filled while the others stay hidden.

    By default a [MASK] is one piece, any of the vocabulary, and `p` its probability.
    With `max_pieces` it is a whole word of up to so many pieces: for each number of
    pieces n, n masks stand there and are filled from left to right, each by what may
    stand there in a word, the best `top` beginnings going on. With p_i the probability
    of piece i after those before it, the score is

        mean: (p_1 … p_n) ** (1 / n)        sum: p_1 … p_n

    Neither is a probability of the word, as the model is told how many pieces there
    are; `sum` prefers short words.

    Raises InputError for a text that has no [MASK] or is too long.
    """
    if score not in SCORES:
        raise InputError(f"score={score!r}; expected one of {', '.join(SCORES)}.")
    masked = [_Masked.of(reader, text, max_pieces or 1) for text in texts]
    if max_pieces is None:
        words = _pieces(reader, masked, top)
    else:
        lengths = range(1, max_pieces + 1)
        each = [_words(reader, masked, n, top, SCORES[score]) for n in lengths]
        words = [sum(of_mask, []) for of_mask in zip(*each, strict=True)]
    words = [sorted(found, key=lambda word: -word.p)[:top] for found in words]
    ends = np.cumsum([len(text.places) for text in masked])
    return [words[end - len(t.places) : end] for t, end in zip(masked, ends)]  # noqa: B905


class _Masked(NamedTuple):
    tokens_T: np.ndarray  # with [CLS] and [SEP]
    places: np.ndarray  # of the masks

    @classmethod
    def of(cls, reader, text, most):
        tokens_T = reader.tokenizer.encode_with_masks(text).tokens
        places = np.flatnonzero(tokens_T == reader.tokenizer.special.mask)
        if not len(places):
            raise InputError(
                f"no [MASK] in {text!r}: write it in capitals, where a word is."
            )
        more = np.repeat(tokens_T[places[:1]], most - 1)
        reader.frame(np.concatenate([tokens_T, more]))  # refuses what is too long
        return cls(reader.frame(tokens_T), places + 1)


def _pieces(reader, masked, top):
    """Returns for each mask its best pieces."""
    tokens = [text.tokens_T for text in masked for _ in text.places]
    places = [place for text in masked for place in text.places]
    ids_NxK, log_p_NxK = _best(reader, tokens, places, Pieces.ANY, top)
    return [
        [
            Choice(reader.tokenizer.piece(id_), float(np.exp(log_p)))
            for id_, log_p in zip(ids_K, log_p_K, strict=True)
        ]
        for ids_K, log_p_K in zip(ids_NxK, log_p_NxK, strict=True)
    ]


def _words(reader, masked, n, top, score):
    """Returns for each mask its best words of `n` pieces."""
    mask = reader.tokenizer.special.mask
    beams = [
        [_Beam(np.insert(text.tokens_T, place, [mask] * (n - 1)), place, ())]
        for text in masked
        for place in text.places
    ]
    for i in range(n):
        flat = [beam for each in beams for beam in each]
        kind = Pieces.LATER if i else Pieces.FIRST
        places = [beam.place + i for beam in flat]
        found = _best(reader, [beam.tokens_T for beam in flat], places, kind, top)
        extended = iter(
            beam.extended(i, found[0][k], found[1][k]) for k, beam in enumerate(flat)
        )
        beams = [
            sorted((b for _ in each for b in next(extended)), key=lambda b: -b.total)
            for each in beams
        ]
        beams = [each[:top] for each in beams]
    decode = reader.tokenizer.decode
    return [
        [
            Choice(
                decode(b.tokens_T[b.place : b.place + n]).strip(),
                float(np.exp(score(b.log_p))),
            )
            for b in each
        ]
        for each in beams
    ]


class _Beam(NamedTuple):
    """The beginning of a word, in its text; the rest is masked."""

    tokens_T: np.ndarray
    place: int  # of the word
    log_p: tuple[float, ...]  # of its pieces so far

    @property
    def total(self):
        return sum(self.log_p)

    def extended(self, i, ids_K, log_p_K):
        for id_, log_p in zip(ids_K, log_p_K, strict=True):
            if np.isfinite(log_p):  # else there are no more pieces
                tokens_T = self.tokens_T.copy()
                tokens_T[self.place + i] = id_
                yield _Beam(tokens_T, self.place, (*self.log_p, float(log_p)))


def _best(reader, tokens, places, kind, top):
    rows = Rows(tokens, np.array(places, np.int32), np.full(len(tokens), kind))
    return reader.best(rows, min(top, reader.tokenizer.vocab_size))


def describe(text, filled):
    """Returns the answer as lines for a person."""
    lines = [text]
    for number, choices in enumerate(filled, 1):
        label = f"[MASK] {number}" if len(filled) > 1 else "[MASK]"
        found = "  ".join(f"{choice.text} {choice.p:.1%}" for choice in choices)
        lines.append(f"  {label}: {found}")
    return "\n".join(lines)
