"""Finds the first step at which two runs hid different tokens.

    python -m mlm_jax.diff_ledgers runs/a runs/b

A run's `ledger.jsonl` tells, for each step, what its corruption did: how many tokens
it hid and predicted, by what it replaced them, how long its units were, and a hash over
every hidden position. Exits with 0 if the steps that both runs have are the same, with
1 and the first difference if not.
"""

import json
import pathlib

from mlm_jax import command
from mlm_jax.errors import InputError


def first_difference(a, b):
    """Returns (step, {field: (value in a, value in b)}) of two ledgers, or None.

    `a` and `b` are iterables of ledger lines (dicts); the shorter one decides how far
    they are compared.
    """
    for line_a, line_b in zip(a, b, strict=False):
        fields = {
            name: (line_a.get(name), line_b.get(name))
            for name in line_a | line_b
            if line_a.get(name) != line_b.get(name)
        }
        if fields:
            return min(line_a["step"], line_b["step"]), fields
    return None


def read_ledger(workdir):
    """Yields the lines of a run's ledger. Raises InputError where it cannot be read."""
    path = pathlib.Path(workdir) / "ledger.jsonl"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InputError(f"{workdir} holds no ledger.jsonl.") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error


def main(workdirs):
    if len(workdirs) != 2:
        raise InputError(f"expected the directories of two runs, got {len(workdirs)}.")
    ledgers = [list(read_ledger(workdir)) for workdir in workdirs]
    found = first_difference(*ledgers)
    if found is None:
        print(f"the same masks at all {min(map(len, ledgers)):,} steps that both have")
        return
    step, fields = found
    print(f"step {step:,} is the first that differs:")
    for name, (value_a, value_b) in fields.items():
        print(f"  {name}: {value_a} in {workdirs[0]}, {value_b} in {workdirs[1]}")
    raise SystemExit(1)


if __name__ == "__main__":
    command.run(main, positional="workdirs")
