"""Runs an experiment: every arm with every seed, and goes on where it was stopped.

    python -m mlm_jax.sweep experiments/mask_rate.py:small --workdir=runs/mask_rate
    python -m mlm_jax.report experiments/mask_rate.py:small --workdir=runs/mask_rate

Prints the plan first: the runs, which of them share a compiled program, and about how
long they take; with --plan nothing more. Runs that are finished, or had to stop, are
left as they are; an arm whose config has changed since is refused by name.

Each run is an ordinary one in `WORKDIR/ARM/seedN`. On a CPU, which a single run fills,
runs of one program come one after another; elsewhere they are trained together, as one
stacked state (--together). --only=ARM leaves the others out.

With --slurm (and --slurm_partition=… and so on, as for `mlm_jax.launch`) every arm is a
task of a job array.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import sys
import time

import jax
from absl import flags

from mlm_jax import (
    benchmark_parts,
    checkpoint,
    command,
    config,
    files,
    huge_pages,
    metrics,
    parallel,
    population,
    processes,
    program,
    slurm_flags,
    workdir,
)
from mlm_jax.data import rows
from mlm_jax.data.progress import duration
from mlm_jax.errors import InputError, NonFiniteError, WorkdirBusyError
from mlm_jax.experiment import branch, halving, sweep
from mlm_jax.experiment.results import DIVERGED
from mlm_jax.flops import config_flops
from mlm_jax.training import Training, drive

WORKDIR = command.define_workdir("where the runs of the experiment are kept")
PLAN = flags.DEFINE_bool("plan", False, "Print the plan and stop.")
TOGETHER = flags.DEFINE_integer(
    "together", None, "Runs trained at once; by default 1 on a CPU, else all.", 1
)
ONLY = flags.DEFINE_multi_string("only", [], "An arm to run, of all; may be repeated.")

# Share of a large matrix product's rate that a small model's step reaches on a CPU.
USUAL_SHARE = 0.4


def status(run):
    """Returns `diverged`, `finished`, `begun` or `new`."""
    if (run.directory / DIVERGED).exists():
        return "diverged"
    if not steps_left(run):
        return "finished"
    return "begun" if (run.directory / "config.json").exists() else "new"


def step_cost(c, slots=None):
    """Returns (prediction slots of a row, floating-point operations of a step)."""
    slots = slots or program.num_slots(c, c.corruption)
    return slots, config_flops(c, slots)


def check_unchanged(runs):
    """Raises InputError, naming the arm, for one whose directory has another config."""
    for run in runs:
        try:
            workdir.check_config(run.directory, run.config, ())
        except InputError as error:
            raise InputError(
                f"{run.name}: {error} An arm that has changed needs another name, or "
                f"its directory removed: {run.directory}"
            ) from error


def describe(experiment, runs, left):
    """Returns the plan as text, for all runs and those with steps left."""
    states = [status(run) for run in runs]
    counts = ", ".join(
        f"{states.count(name)} {name}"
        for name in ("finished", "diverged", "begun", "new")
        if name in states
    )
    lines = [
        f"{experiment.name}: {experiment.question.splitlines()[0]}",
        f"{len(runs)} runs, {len(experiment.arms)} arms x {len(experiment.seeds)} "
        f"seeds: {counts}",
    ]
    if not left:
        return "\n".join([*lines, "nothing is left to do"])
    rate = matrix_rate()
    total = 0.0
    for number, group in enumerate(sweep.groups(runs, step_cost), 1):
        arms = dict.fromkeys(run.arm.name for run in group)
        slots, cost = step_cost(group[0].config)
        work = sum(steps_left(run) for run in group if run in left) * cost
        total += work
        lines.append(
            f"  program {number}: {len(group)} runs of {cost / 1e9:.2f} GFLOP a step, "
            f"{slots} slots a row: {', '.join(arms)}"
        )
    seconds = total / rate / USUAL_SHARE
    lines.append(
        f"to do: {total / 1e12:,.1f} TFLOP, about {duration(seconds)} at "
        f"{USUAL_SHARE:.0%} of this machine's {rate / 1e9:,.0f} GFLOP/s"
    )
    return "\n".join(lines)


def steps_left(run, until=None):
    found = checkpoint.steps(run.directory / "checkpoints")
    last = until or run.config.optim.num_steps
    return max(0, last - (found[0] if found else 0))


def to_do(runs, until=None):
    """Returns those that have steps left."""
    return [run for run in runs if status(run) != "diverged" and steps_left(run, until)]


def matrix_rate():
    product, operations = benchmark_parts.matrix_product("float32")
    times = benchmark_parts.measure({"product": product}, rounds=5)["product"]
    return operations / min(times)


class Clock:
    """How far the experiment is, in steps of all runs; those that halving ends on the
    way count as if they went on."""

    def __init__(self, runs):
        self._begin, self._left = time.perf_counter(), sum(map(steps_left, runs))
        self._total = self._left

    def ended(self, run, num_steps, what):
        self._left -= num_steps
        done = self._total - self._left
        spent = time.perf_counter() - self._begin
        left = duration(metrics.mean(spent, done) * self._left)
        print(
            f"{run.name} {what}: {done:,} of {self._total:,} steps, {left} left",
            flush=True,
        )


def train(groups, chosen, clock, stop, until=None):
    """Trains what has steps left of the runs chosen up to step `until`, by default the
    last.

    A program is that of its whole group, whatever is left of it: with other prediction
    slots the numbers would be rounded otherwise.
    """
    for group in groups:
        left = to_do([run for run in group if run in chosen], until)
        if left:
            train_group(group[0].config, left, clock, stop, until)


def train_group(first, runs, clock, stop, until):
    """Trains the runs by the program of config `first`, in turn or together."""
    store = rows.prepare(first.data, config.tokenizer_of(first))
    sizes = config.check_devices(first, jax.local_device_count())
    together = TOGETHER.value or (1 if jax.default_backend() == "cpu" else len(runs))
    mesh = parallel.make_mesh(sizes if together == 1 else {"data": 1})
    made = program.make_program(
        first, store.tokenizer, store.token_counts, mesh, step_cost(first)[0]
    )
    step = made.train_step
    if together > 1:
        step = population.make_step(made.step, together)
    for some in itertools.batched(runs, together):
        with contextlib.ExitStack() as stack:
            held, trainings = [], []
            for run in some:
                try:
                    stack.enter_context(workdir.held(run.directory))
                except WorkdirBusyError as error:
                    print(f"{run.name} is left out: {error}", flush=True)
                    continue
                workdir.check_data(run.directory, store, ())
                print(f"{run.name}:", flush=True)
                trainings.append(
                    Training(run.config, run.directory, store, made, mesh, until=until)
                )
                held.append(run)
            if not held:
                continue
            if together == 1:
                failed = drive_one(trainings[0], step, stop)
            else:
                failed = population.drive(trainings, step, stop)
            for i, (run, training) in enumerate(zip(held, trainings, strict=True)):
                if i in failed:
                    reason = {"reason": str(failed[i])}
                    files.write_text(run.directory / DIVERGED, json.dumps(reason))
                reached = f"is at step {training.until:,}"
                num_steps = training.until - (training.start or 0)
                clock.ended(run, num_steps, "diverged" if i in failed else reached)


def drive_one(training, step, stop):
    try:
        drive(training, step, stop)
    except NonFiniteError as error:
        return {0: error}
    return {}


def submit(file, experiment, left):
    """Submits the arms that have steps left, each to run by this command."""
    if experiment.trunk is not None or experiment.rungs:
        raise InputError(
            f"{file}: arms with TRUNK or RUNGS wait for each other; without --slurm, "
            "one job runs them all."
        )
    arms = list(dict.fromkeys(run.arm.name for run in left))
    ours = [a for a in slurm_flags.others(sys.argv[1:]) if "--only=" not in a]
    this = [sys.executable, "-m", "mlm_jax.sweep", *ours]
    with slurm_flags.submitting(WORKDIR.value) as (slurm, folder):
        job = slurm.submit_array(
            [[*this, f"--only={arm}"] for arm in arms],
            folder=folder,
            cwd=os.getcwd(),
            parameters=slurm_flags.parameters(experiment.name),
        )
    print(f"array {job} of {len(arms)} tasks: see {folder}; scancel {job} ends it.")


def main(arguments):
    if len(arguments) != 1:
        raise InputError(
            "expected one experiment file, such as experiments/mask_rate.py:small."
        )
    experiment = sweep.load(arguments[0])
    directory = pathlib.Path(WORKDIR.value)
    found = sweep.runs(experiment, directory)
    names = [arm.name for arm in experiment.arms]
    for name in ONLY.value:
        command.check_field(name, names, "--only=")
    trunks = sweep.trunk_runs(experiment, directory)
    check_unchanged([*trunks, *found])
    chosen = [run for run in found if not ONLY.value or run.arm.name in ONLY.value]
    left = to_do([*trunks, *chosen])
    print(describe(experiment, [*trunks, *found], left), flush=True)
    if PLAN.value:
        return
    if slurm_flags.SLURM.value:
        submit(arguments[0], experiment, left)
        return
    clock = Clock(left)
    with processes.StopSignal() as stop:
        train(sweep.groups(trunks, step_cost), trunks, clock, stop)
        for run in chosen if trunks else ():
            trunk = trunks[experiment.seeds.index(run.seed)]
            if status(trunk) == "finished":
                branch.make(trunk, trunk.config.optim.num_steps, run)
        for until in (*experiment.rungs, None):
            alive = halving.survivors(experiment, found, until or math.inf)
            runs = [run for run in chosen if run.arm in alive]
            if trunks:  # a branch whose trunk has failed has nothing to go on from
                runs = [run for run in runs if status(run) != "new"]
            train(sweep.groups(found, step_cost), runs, clock, stop, until)
            if until:
                print(f"step {until}: {len(alive)} arms were there", flush=True)
    print(
        f"done: python -m mlm_jax.report {arguments[0]} --workdir={directory}",
        flush=True,
    )


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main, positional="an experiment file")
