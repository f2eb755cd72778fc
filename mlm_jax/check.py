"""Verifies a run: its checkpoints, its rows, and what it has logged.

    python -m mlm_jax.check --workdir=runs/austen

Prints `step N digest sha256:…` over parameters, optimizer state and step of the newest
whole checkpoint: two runs that print the same line hold the same bits. What was found
goes to stderr. Exits with 4 if no checkpoint can be used, with 1 if something else is
damaged. Changes nothing, so it may look at a run that goes on.
"""

import collections
import pathlib
import sys

from mlm_jax import checkpoint, command, config, manifest, metrics, workdir
from mlm_jax.data import rows
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import CheckpointError, DamageError, InputError

WORKDIR = command.define_workdir("what to look at")
NO_STEP = "none: no step was made, as in a run that was imported"


def checkpoints(directory):
    """Yields (step, facts or None, what was found) of each checkpoint, newest first."""
    folder = directory / "checkpoints"
    for step in checkpoint.steps(folder):
        path = folder / str(step)
        try:
            checkpoint.load(path)
        except (DamageError, CheckpointError) as error:
            if path.exists():  # else a run that goes on has removed it meanwhile
                yield step, None, f"damaged: {error}"
        else:
            facts = manifest.read(path)
            yield step, facts, f"whole: {len(facts['files'])} files"


def tokenizer(directory):
    """Returns what was found of it. Raises InputError for damage, as all below do."""
    size = Tokenizer.load(directory / "tokenizer.json").vocab_size
    return f"whole: {size:,} entries"


def row_store(directory, c):
    """Reads every row, of which each has its hash."""
    fingerprint = workdir.read_environment(directory).get("data.fingerprint")
    if fingerprint is None:
        return "unknown: no environment.json"
    try:
        splits = rows.find(c.data, fingerprint)
    except FileNotFoundError as error:
        return f"not there, and made anew when it is needed: {error}"
    for split in splits:
        split.verify()
    return f"whole: {' and '.join(f'{len(split):,}' for split in splits)} rows"


def metric_lines(directory, newest, every_steps):
    """A line a step and kind, in order, and as far as the newest checkpoint."""
    if not newest and not (directory / "metrics.jsonl").exists():
        return NO_STEP
    lines = metrics.read_json_lines(directory / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    _check_order("metrics.jsonl", steps)
    kinds = (
        (line["step"], any(name.startswith("eval/") for name in line)) for line in lines
    )
    twice = [step for (step, _), n in collections.Counter(kinds).items() if n > 1]
    if twice:
        raise InputError(f"metrics.jsonl has step {twice[0]} twice.")
    last = max(steps, default=-every_steps)
    if last <= newest - every_steps:
        raise InputError(f"metrics.jsonl ends at step {last}, before step {newest}.")
    return f"whole: {len(lines):,} lines, to step {last:,}"


def ledger_lines(directory, newest):
    """Every step once, from the first, and as far as the newest checkpoint."""
    if not newest and not (directory / "ledger.jsonl").exists():
        return NO_STEP
    steps = [s["step"] for s in metrics.read_json_lines(directory / "ledger.jsonl")]
    _check_order("ledger.jsonl", steps)
    missing = set(range(1, max([newest, *steps]) + 1)) - set(steps)
    if missing:
        raise InputError(f"ledger.jsonl lacks step {min(missing)}.")
    if len(steps) > len(set(steps)):
        raise InputError("ledger.jsonl has a step twice.")
    return f"whole: {len(steps):,} steps"


def _check_order(name, steps):
    for before, after in zip(steps, steps[1:], strict=False):
        if after < before:
            raise InputError(f"{name} has step {after} after step {before}.")


def main(arguments):
    del arguments
    directory = pathlib.Path(WORKDIR.value)
    c = config.load(directory)
    num_damaged, newest = 0, None
    for step, facts, text in checkpoints(directory):
        _report(f"checkpoint {step}", text)
        num_damaged += facts is None
        if facts and newest is None:
            newest = step
            print(f"step {step} digest sha256:{facts['digest']}", flush=True)

    for name, look in {
        "tokenizer.json": lambda: tokenizer(directory),
        "row store": lambda: row_store(directory, c),
        "metrics.jsonl": lambda: metric_lines(
            directory, newest or 0, c.log.every_steps
        ),
        "ledger.jsonl": lambda: ledger_lines(directory, newest or 0),
    }.items():
        try:
            _report(name, look())
        except InputError as error:
            _report(name, f"damaged: {error}")
            num_damaged += 1
    if newest is None:
        raise CheckpointError(f"no checkpoint of {directory} can be used.")
    if num_damaged:
        raise DamageError(f"{num_damaged} of these are damaged.")


def _report(name, text):
    print(f"{name}: {text}", file=sys.stderr)


if __name__ == "__main__":
    command.run(main)
