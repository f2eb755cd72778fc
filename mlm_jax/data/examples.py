"""What a task is made of: examples with labels by name, from a table's columns.

Nothing here depends on where a record came from: a line of JSON, a row of TSV and a
record of a TFDS data set all come as {column: value} with a place for error texts.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlm_jax.errors import InputError

MAX_NAMED = 12  # labels in an error text


class Answer(NamedTuple):
    start: int  # character of the context
    text: str


class Example(NamedTuple):
    """One example.

    Attributes:
      where: file and line, or data set and record, for error texts.
      texts: one text, two of a pair, a question and its context, or the words of a
        tagged sentence.
      label: a name; a number; a name for each word; the answers, none if there is none.
    """

    where: str
    texts: tuple[str, ...]
    label: Any


class Columns(NamedTuple):
    """Which column is what: `pair` is the second text, or None."""

    text: str
    pair: str | None
    label: str


def read(kind: str, records: Iterable[tuple[str, Mapping]], columns: Columns):
    """Returns the Examples of (where, record) pairs.

    Args:
      kind: `classification`, `regression`, `tagging` or `spans`.
      records: a record is {column: value}.
      columns: for `tagging` text and label are lists, or one string that is split at
        spaces; for `spans` text is the question, pair the context, and label
        {"text": […], "answer_start": […]}, as in SQuAD.

    Raises:
      InputError: for a column that is not there or has a value of another type.
    """
    make = _MAKERS[kind]
    found = []
    for where, record in records:

        def get(field, where=where, record=record):
            name = getattr(columns, field)
            if name not in record:
                raise InputError(
                    f"{where}: no column {name!r}, which config.task.{field} names"
                    f"{nearest(name, record)}"
                )
            return record[name]

        found.append(make(where, get, columns))
    return found


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns '; did you mean …?', with all names if none is near."""
    known = [str(known) for known in names]
    near = difflib.get_close_matches(str(name), known, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    some = ", ".join(map(repr, known[:MAX_NAMED]))
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    return f"; there are {some or 'none'}{more}."


def label_names(examples: Iterable[Example]) -> tuple[str, ...]:
    """Returns the names of all labels, sorted: no order of appearance enters."""
    names: set[str] = set()
    for example in examples:
        names.update(
            example.label if isinstance(example.label, tuple) else [example.label]
        )
    return tuple(sorted(names))


def label_id(name: str, ids: Mapping[str, float], where: str) -> float:
    """Returns the id of a label. Raises InputError, naming the place and the nearest
    label, for one that is none of them."""
    if name not in ids:
        raise InputError(
            f"{where}: label {name!r} is none of the {len(ids)} of the training data"
            f"{nearest(name, ids)}"
        )
    return ids[name]


def _classified(where, get, columns):
    return Example(where, _texts(where, get, columns), _name(where, get("label")))


def _regressed(where, get, columns):
    value = get("label")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: {columns.label} = {value!r}; expected a finite number."
        ) from None
    return Example(where, _texts(where, get, columns), number)


def _tagged(where, get, columns):
    words = _words(where, columns.text, get("text"))
    tags = _words(where, columns.label, get("label"))
    if len(words) != len(tags):
        raise InputError(
            f"{where}: {len(words)} words in {columns.text} and {len(tags)} tags in "
            f"{columns.label}; expected a tag for each word."
        )
    return Example(where, words, tags)


def _answered(where, get, columns):
    question, context = _texts(where, get, columns)
    value = get("label")
    try:
        texts, starts = value["text"], value["answer_start"]
        answers = tuple(
            Answer(int(start), _text(where, columns.label, text))
            for start, text in zip(starts, texts, strict=True)
        )
    except (TypeError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{where}: {columns.label} = {value!r}; expected "
            '{"text": [...], "answer_start": [...]}, empty if there is no answer.'
        ) from None
    for answer in answers:
        end = answer.start + len(answer.text)
        found = context[answer.start : end] if answer.start >= 0 else ""
        if not answer.text.strip() or found != answer.text:
            raise InputError(
                f"{where}: the answer {answer.text!r} is not at character "
                f"{answer.start} of {columns.pair}, where {found!r} is."
            )
    return Example(where, (question, context), answers)


def _texts(where, get, columns) -> tuple[str, ...]:
    texts = [_text(where, columns.text, get("text"))]
    if columns.pair is not None:
        texts.append(_text(where, columns.pair, get("pair")))
    return tuple(texts)


def _text(where: str, column: str, value) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {column} = {value!r}; expected a text.")
    return value


def _name(where: str, value) -> str:
    """A label's name: text as it is, a whole number or a truth value as JSON has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: label {value!r}; expected a name.")
    return value


def _words(where: str, column: str, value) -> tuple[str, ...]:
    words = value.split() if isinstance(value, str) else value
    is_list = isinstance(words, Sequence) and not isinstance(words, str)
    if not is_list or not all(isinstance(w, str) and w.strip() for w in words):
        raise InputError(
            f"{where}: {column} = {value!r}; expected a list of words, or words with "
            "spaces between them."
        )
    if not words:
        raise InputError(f"{where}: {column} has no words.")
    return tuple(words)


_MAKERS: dict[str, Callable] = {
    "classification": _classified,
    "regression": _regressed,
    "tagging": _tagged,
    "spans": _answered,
}
