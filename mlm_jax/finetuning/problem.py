"""A task made ready for an encoder: labels, rows of every split, and their scores.

Imports no jax.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np

from mlm_jax.data import examples, task_files, task_rows
from mlm_jax.data.examples import Columns, Example
from mlm_jax.data.task_rows import TaskRows
from mlm_jax.errors import InputError
from mlm_jax.finetuning import scores

SPLITS = ("train", "validation", "test")
PER_TOKEN = ("tagging", "spans")


class Problem(NamedTuple):
    """A task, its targets as numbers.

    Attributes:
      kind: of the task.
      labels: names in the order of their ids; () for numbers and spans.
      scale: {"mean", "deviation"} of the training targets of a regression, else {}.
      metric: the score that validation goes by.
      positive: the label that `f1` is of, or None.
      max_answer: tokens of an answer.
      row_length: L.
      examples: {split: its Examples}; there may be no test.
      rows: {split: TaskRows}.
    """

    kind: str
    labels: tuple[str, ...]
    scale: dict[str, float]
    metric: str
    positive: str | None
    max_answer: int
    row_length: int
    examples: dict[str, list[Example]]
    rows: dict[str, TaskRows]

    @property
    def num_outputs(self) -> int:
        """C: a logit a label, one number, or (start, end)."""
        return {"regression": 1, "spans": 2}.get(self.kind, len(self.labels))

    @property
    def per_token(self) -> bool:
        return self.kind in PER_TOKEN

    @property
    def digest(self) -> str:
        """sha256 over texts and labels of all splits: whether two are the same."""
        facts = {
            split: [(example.texts, example.label) for example in found]
            for split, found in self.examples.items()
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def make(c, tokenizer, max_length, labels=None):
    """Returns the Problem of a config.

    Args:
      c: a checked config of a fine-tuning.
      tokenizer: that of the encoder.
      max_length: tokens in a row of the encoder's run, the most that it takes.
      labels: the names in the order of their ids, where a workdir has them stored; else
        those of the training examples, sorted.

    Raises:
      InputError: for data that cannot be used, naming the place.
    """
    found = {split: _examples(c, split) for split in SPLITS if c.task[split]}
    kind = c.task.kind
    if kind in ("classification", "tagging"):
        labels = _labels(found["train"], labels)
    else:
        labels = ()
    _check_metric(c, found["train"], labels)
    encoded = {
        split: task_rows.encode(kind, some, tokenizer) for split, some in found.items()
    }
    row_length = _row_length(c, encoded, max_length)
    scale = {}
    if kind == "regression":
        targets = np.array([example.label for example in found["train"]], np.float64)
        deviation = float(targets.std())
        scale = {"mean": float(targets.mean()), "deviation": deviation or 1.0}
    rows = {
        split: task_rows.lay(
            kind,
            found[split],
            encoded[split],
            tokenizer=tokenizer,
            row_length=row_length,
            stride=c.task.stride,
            ids=scale or {name: id_ for id_, name in enumerate(labels)},
        )
        for split in found
    }
    return Problem(
        kind=kind,
        labels=labels,
        scale=scale,
        metric=c.task.metric or scores.METRICS[kind][0],
        positive=c.task.positive,
        max_answer=c.task.max_answer,
        row_length=row_length,
        examples=found,
        rows=rows,
    )


def describe(problem: Problem) -> str:
    """Returns the sizes of a problem, and what did not fit, as lines."""
    what = {
        "regression": "numbers with mean {mean:.3f} and deviation {deviation:.3f}",
        "spans": "spans, or no answer",
    }.get(problem.kind, f"{len(problem.labels)} labels: {', '.join(problem.labels)}")
    lines = [f"{problem.kind}: {what.format(**problem.scale)[:500]}"]
    for split, rows in problem.rows.items():
        num_examples = len(problem.examples[split])
        line = f"{split}: {num_examples:,} examples in {rows.num_rows:,} rows"
        if rows.num_cut:
            verb = "divided" if problem.per_token else "truncated"
            line += f", {rows.num_cut:,} longer than {problem.row_length} tokens {verb}"
        lines.append(line)
    return "\n".join(lines)


def score(problem: Problem, split: str, predictions) -> dict[str, float]:
    """Returns the scores of predictions, one for each example, as from `reading`."""
    targets = [example.label for example in problem.examples[split]]
    if problem.kind == "classification":
        return scores.classification(targets, predictions, problem.positive)
    if problem.kind == "regression":
        return scores.regression(targets, predictions)
    if problem.kind == "tagging":
        return scores.tagging(targets, predictions)
    texts = [[answer.text for answer in answers] for answers in targets]
    return scores.spans(texts, predictions)


def _examples(c, split):
    task = c.task
    found = task_files.records(task[split], f"config.task.{split}", task.data_dir)
    columns = Columns(task.text, task.pair, task.label)
    return examples.read(task.kind, found, columns)


def _labels(train, stored):
    names = examples.label_names(train)
    if stored is None:
        if len(names) < 2:
            raise InputError(
                f"the training data has the label {names[0]!r} only; expected two or "
                "more."
            )
        return names
    if set(names) != set(stored):
        missing = sorted(set(stored) - set(names))
        new = sorted(set(names) - set(stored))
        raise InputError(
            f"the training data has other labels than the workdir: {new} are new, "
            f"{missing} are missing. Use another --workdir."
        )
    return tuple(stored)


def _check_metric(c, train, labels):
    positive = c.task.positive
    if positive is not None and positive not in labels:
        raise InputError(
            f"config.task.positive = {positive!r} is no label"
            f"{examples.nearest(positive, labels)}"
        )
    if c.task.metric == "entity_f1" and not scores.are_entities(labels):
        odd = next(name for name in labels if not scores.are_entities([name]))
        raise InputError(
            f"config.task.metric = 'entity_f1'; the tag {odd!r} is none of B-…, I-…, "
            "E-…, S-… and O."
        )
    if c.task.kind == "spans" and not any(example.label for example in train):
        raise InputError("no question of the training data has an answer.")


def _row_length(c, encoded, max_length):
    """Rows need not be longer than the longest example; a multiple of 8 for speed."""
    asked = c.task.row_length
    if asked is not None and asked > max_length:
        raise InputError(
            f"config.task.row_length = {asked}; the encoder was trained on rows of "
            f"{max_length} tokens, so expected at most that."
        )
    if asked is not None:
        return asked
    longest = max(max(map(task_rows.length_of, found)) for found in encoded.values())
    return min(max_length, max(8, -(-longest // 8) * 8))
