"""Minimal pairs: whether a model finds the sentence that is right the likelier one.

A suite is in the form of BLiMP (Warstadt et al. 2020), files of one JSON object a line:

    {"sentence_good": "…", "sentence_bad": "…", "UID": "paradigm", "pairID": "0"}
"""

import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mlm_jax.data.tokenizer import Encoded
from mlm_jax.errors import InputError
from mlm_jax.tasks import agreement
from mlm_jax.tasks.likelihood import DEFAULT, likelihoods

# Nats. A difference this small is one of rounding: it changes with the batch size.
TIE = 1e-4
BUNDLED = "bundled:agreement"


class Pair(NamedTuple):
    uid: str  # of the paradigm
    pair_id: str
    good: str
    bad: str


class Judged(NamedTuple):
    """The pseudo-log-likelihoods of a pair."""

    good: float
    bad: float

    @property
    def is_tie(self):
        return abs(self.good - self.bad) <= TIE

    @property
    def is_correct(self):
        """A tie is not: the model does not know."""
        return self.good > self.bad and not self.is_tie


class Accuracy(NamedTuple):
    pairs: int
    correct: int
    ties: int

    @property
    def share(self):
        return self.correct / self.pairs


def read(path) -> list[Pair]:
    """Returns the pairs of a file, of all `*.jsonl` of a directory, or of
    `bundled:agreement`. Raises InputError, naming file and line, for what is none."""
    if str(path) == BUNDLED:
        return [Pair(*pair) for pair in agreement.pairs()]
    path = pathlib.Path(path).expanduser()
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = [pair for file in files for pair in _read_file(file)]
    if not found:
        raise InputError(f"{path} has no minimal pairs: no *.jsonl with lines in it.")
    return found


def _read_file(path):
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"minimal pairs {path} cannot be read: {reason}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _pair(line, path, number)


def _pair(line, path, number):
    try:
        fields = json.loads(line)
        sentences = fields["sentence_good"], fields["sentence_bad"]
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise TypeError("a sentence is a string")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}, line {number} is no minimal pair ({error!r}): expected an object "
            'with "sentence_good" and "sentence_bad".'
        ) from error
    uid, pair_id = fields.get("UID", path.stem), fields.get("pairID", number - 1)
    return Pair(str(uid), str(pair_id), *sentences)


def encode(reader, pairs: Sequence[Pair]) -> list[Encoded]:
    """Returns the tokens of all sentences, the two of a pair side by side. Raises
    InputError for one that is too long."""
    return reader.encode([text for pair in pairs for text in (pair.good, pair.bad)])


def judge(
    reader, encoded: Sequence[Encoded], kind=DEFAULT, tick=None
) -> Iterator[Judged]:
    """Yields the `Judged` of each pair in what `encode` returned, in order; `kind` and
    `tick` are as `likelihood.likelihoods` has them."""
    found = likelihoods(reader, encoded, kind, tick)
    for good in found:
        yield Judged(good.pll, next(found).pll)


def accuracies(
    pairs: Iterable[Pair], judged: Iterable[Judged]
) -> tuple[dict[str, Accuracy], Accuracy]:
    """Returns the accuracy of each paradigm, and of all pairs together."""
    counts: dict[str, np.ndarray] = {}
    for pair, found in zip(pairs, judged, strict=True):
        counted = np.array([1, found.is_correct, found.is_tie])
        counts[pair.uid] = counts.get(pair.uid, 0) + counted
    overall = Accuracy(*np.sum(list(counts.values()), axis=0).tolist())
    return {uid: Accuracy(*c.tolist()) for uid, c in counts.items()}, overall
