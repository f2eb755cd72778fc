"""Branches: runs that go on from the last step of another run, under another config."""

import json
import os
import shutil

from mlm_jax import config
from mlm_jax.files import write_text

BRANCH = "branch.json"


def make(trunk, step, run):
    """Makes the directory of `run` from that of the run `trunk` at `step`, unless it is
    there: its rows, its log and one checkpoint, under the config of `run`.

    All at once, by a rename. The arms of a trunk may be made at the same time.
    """
    if (run.directory / "config.json").exists():
        return
    making = run.directory.with_name(f"{run.directory.name}.{os.getpid()}.making")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(
        trunk.directory / "checkpoints" / str(step), making / "checkpoints" / str(step)
    )
    for name in ("tokenizer.json", "environment.json", "metrics.jsonl", "ledger.jsonl"):
        shutil.copy(trunk.directory / name, making / name)
    config.save(run.config, making)
    origin = {"trunk": str(trunk.directory), "step": step}
    write_text(making / BRANCH, json.dumps(origin) + "\n")
    shutil.rmtree(run.directory, ignore_errors=True)  # it holds no run
    making.rename(run.directory)
