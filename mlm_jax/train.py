"""Trains a masked language model.

    python -m mlm_jax.train --config=configs/tiny.py --workdir=runs/tiny \
        --config.corruption.rate=0.4

Prepares the data, trains, evaluates on held-out text, saves checkpoints, and ends by
filling masks. The same command again resumes where the run stopped.

A run does not go on under another config, vocabulary or data, unless the fields are
named: --allow_change=optim.peak_learning_rate,data.fingerprint. With --extend_to=N it
goes on to step N; from where it resumes, the schedules are those of a run of N steps.
"""

import contextlib
import json
import pathlib

import jax
from absl import flags

from mlm_jax import (
    command,
    config,
    huge_pages,
    parallel,
    processes,
    profiling,
    workdir,
)
from mlm_jax.data import rows
from mlm_jax.errors import InputError
from mlm_jax.program import make_program
from mlm_jax.tasks.fill_mask import describe, fill_mask
from mlm_jax.tasks.reader import Reader
from mlm_jax.training import Training, drive

CONFIG = command.define_config()
WORKDIR = command.define_workdir("where the run is kept, and resumed from")
ALLOW_CHANGE = flags.DEFINE_list(
    "allow_change", [], "Fields of the config that the run goes on with changed."
)
EXTEND_TO = flags.DEFINE_integer(
    "extend_to", None, "Go on to this step, beyond config.optim.num_steps."
)
PROFILE = flags.DEFINE_bool(
    "profile", False, "Trace steps 11 to 15 of this start into WORKDIR/profile."
)


def run(c, directory, *, allowed=(), profile=False):
    """Trains config `c` to its last step, from where an earlier call stopped.

    Raises InputError before any compilation for what cannot work, and for a directory
    that cannot be written; WorkdirBusyError if another process trains there;
    CheckpointError if there are checkpoints and none can be used; NonFiniteError for a
    loss or gradient that is not a number; Preempted after saving on SIGTERM or SIGINT.
    `allowed` are the fields that may differ from those the run began with. With
    `profile` some steps are traced; see `profiling`.
    """
    config.check(c)
    sizes = config.check_devices(c, jax.device_count())
    processes.check(c, sizes)
    processes.agree("config", json.dumps(config.flatten(c)))
    directory = pathlib.Path(directory)
    is_first = processes.is_first()
    with workdir.held(directory) if is_first else contextlib.nullcontext():
        changes = workdir.check_config(directory, c, allowed)
        # One process makes it, the others wait.
        store = rows.prepare(c.data, config.tokenizer_of(c))
        changes |= workdir.check_data(directory, store, allowed)
        processes.agree("data.fingerprint", store.fingerprint)
        _run(c, directory, store, sizes, changes, profile)
        processes.wait_for_all("the end")


def _run(c, directory, store, sizes, changes, profile):
    mesh = parallel.make_mesh(sizes)
    program = make_program(c, store.tokenizer, store.token_counts, mesh)
    training = Training(c, directory, store, program, mesh, changes=changes)
    if training.is_finished:
        print(
            f"{directory} is finished: step {training.start:,} of "
            f"{c.optim.num_steps:,}; --extend_to=N goes on."
        )
    else:
        train_step = program.train_step
        if profile:
            train_step = profiling.traced(train_step, directory / "profile")
        with processes.StopSignal() as stop:
            drive(training, train_step, stop)
    params = jax.device_get(processes.whole(training.get_state().params, mesh))
    if c.eval.fill_mask and processes.is_first():
        here = parallel.make_mesh({"data": 1}, jax.local_devices())
        reader = Reader(
            program.model, params, store.tokenizer, here, row_length=c.data.row_length
        )
        texts = c.eval.fill_mask
        for text, filled in zip(texts, fill_mask(reader, texts), strict=True):
            print(describe(text, filled))


def main(arguments):
    del arguments
    processes.start()
    c, allowed = CONFIG.value, list(ALLOW_CHANGE.value)
    fields = [*config.flatten(c), "tokenizer.digest", "data.fingerprint"]
    for name in allowed:
        command.check_field(name, fields, "--allow_change=")
    if EXTEND_TO.value is not None:
        if EXTEND_TO.value < c.optim.num_steps:
            raise InputError(
                f"--extend_to={EXTEND_TO.value}; expected config.optim.num_steps = "
                f"{c.optim.num_steps} or more."
            )
        c.optim.num_steps = EXTEND_TO.value
        allowed.append("optim.num_steps")
    run(c, WORKDIR.value, allowed=allowed, profile=PROFILE.value)


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main)
