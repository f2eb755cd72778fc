"""The directory of a fine-tuning: what it is of, the trials, the best, the result.

`config.json` (of the fine-tuning), `task.json` (labels by name, and what makes up the
numbers), `encoder/config.json` and `tokenizer.json` (of the run it came from),
`trials/NAME.json`, `checkpoints/` (the best trial so far), `result.md`, `result.json`.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from mlm_jax import checkpoint, config
from mlm_jax.errors import InputError
from mlm_jax.files import as_json, write_text
from mlm_jax.finetuning import settings, step, table


def labels(directory):
    """Returns the stored labels in the order of their ids; None before there are."""
    path = directory / "task.json"
    return tuple(_read(path)["labels"]) if path.exists() else None


def begin(directory, c, problem, trained):
    """Writes what the directory is of. Raises InputError, naming it, for anything in
    which an earlier call differs."""
    task = {
        "labels": problem.labels,
        "scale": problem.scale,
        "row_length": problem.row_length,
        "metric": problem.metric,
        "data": problem.digest,
        "encoder_step": trained.step,
        "encoder": checkpoint.digest(jax.device_get(trained.params)),
        "tokenizer": trained.tokenizer.digest,
    }
    task = json.loads(json.dumps(task))
    path = directory / "task.json"
    if path.exists():
        old = _fields(_read(directory / "config.json")) | _read(path)
        new = _fields(json.loads(json.dumps(c.to_dict()))) | task
        _check_same(directory, old, new)
    config.save(c, directory)
    config.save(trained.config, directory / "encoder")
    trained.tokenizer.save(directory / "tokenizer.json")
    write_text(path, json.dumps(task, indent=2) + "\n")  # last: all of it is there


def has(directory, trial):
    return _path(directory, trial).exists()


def read(directory, trial):
    """Returns the facts of a finished trial."""
    return _read(_path(directory, trial))


def add(directory, trial, outcome, metric):
    """Keeps the facts of a trial, and its parameters if it is the best so far."""
    finished = [_read(path) for path in (directory / "trials").glob("*.json")]
    best = max((_value(facts, metric) for facts in finished), default=-math.inf)
    if outcome.params is not None and (
        not finished or _value(outcome.facts, metric) > best
    ):
        _save(directory, len(finished) + 1, outcome)
    write_text(_path(directory, trial), as_json(outcome.facts))


def finish(directory, result, problem):
    """Writes the result; returns it as text."""
    text = table.markdown(result, f"# {problem.kind}: {directory.name}")
    write_text(directory / "result.md", text)
    write_text(directory / "result.json", as_json(result))
    return text


def _save(directory, number, outcome):
    state = step.TaskState(
        step=jnp.int32(number),
        params=outcome.params,
        opt_state=(),
        key=jax.random.key(outcome.facts["seed"]),
        hparams={
            name: np.float64(outcome.facts[name]) for name in ("learning_rate", "seed")
        },
    )
    with checkpoint.Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(number, state)


def _check_same(directory, old, new):
    different = [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"[:300]
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in settings.FREE
    ]
    if different:
        raise InputError(
            f"{directory} holds another fine-tuning: {'; '.join(different)}. Use "
            "another --workdir."
        )


def _fields(values):
    """Returns {"section.field": value} of a config as JSON has it."""
    return config.flatten(ml_collections.ConfigDict(values))


def _value(facts, metric):
    value = (facts["validation"] or {}).get(metric)
    return -math.inf if value is None or math.isnan(value) else value


def _path(directory, trial):
    return pathlib.Path(directory) / "trials" / f"{trial.name}.json"


def _read(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it.") from error
