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
import os
import pathlib

import jax
import numpy as np
from absl import flags

from mlm_jax import (
    checkpoint,
    command,
    config,
    huge_pages,
    metrics,
    parallel,
    processes,
    workdir,
)
from mlm_jax.data import pipeline, rows
from mlm_jax.errors import InputError, NonFiniteError, Preempted
from mlm_jax.evaluate import evaluate, unigram_entropy
from mlm_jax.program import eval_hparams, make_program
from mlm_jax.tasks.fill_mask import describe, fill_mask

CONFIG = command.define_config()
WORKDIR = command.define_workdir("where the run is kept, and resumed from")
ALLOW_CHANGE = flags.DEFINE_list(
    "allow_change", [], "Fields of the config that the run goes on with changed."
)
EXTEND_TO = flags.DEFINE_integer(
    "extend_to", None, "Go on to this step, beyond config.optim.num_steps."
)


def run(c, directory, *, allowed=()):
    """Trains config `c` to its last step, from where an earlier call stopped.

    Raises InputError before any compilation for what cannot work, and for a directory
    that cannot be written; WorkdirBusyError if another process trains there;
    CheckpointError if there are checkpoints and none can be used; NonFiniteError for a
    loss or gradient that is not a number; Preempted after saving on SIGTERM or SIGINT.
    `allowed` are the fields that may differ from those the run began with.
    """
    config.check(c)
    sizes = config.check_devices(c, jax.device_count())
    processes.check(c, sizes)
    processes.agree("config", json.dumps(config.flatten(c)))
    directory = pathlib.Path(directory)
    is_first = processes.is_first()
    with workdir.held(directory) if is_first else contextlib.nullcontext():
        changes = workdir.check_config(directory, c, allowed)
        store = rows.prepare(c.data, c.tokenizer)  # one makes it, the others wait
        changes |= workdir.check_data(directory, store, allowed)
        processes.agree("data.fingerprint", store.fingerprint)
        _run(c, directory, store, sizes, changes)
        processes.wait_for_all("the end")


def _run(c, directory, store, sizes, changes):
    mesh = parallel.make_mesh(sizes)
    program = make_program(c, store.tokenizer, store.token_counts, mesh)
    train_batches = pipeline.TrainBatches(
        store.train,
        batch_size=c.data.batch_size,
        seed=c.seed,
        ramp=c.data.batch_ramp,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )
    exam = Exam(c, store, program, mesh)

    with checkpoint.Checkpoints(
        directory,
        keep=c.checkpoint.keep,
        keep_best=c.checkpoint.keep_best,
        keep_every=c.checkpoint.keep_every,
    ) as checkpoints:
        start, state = checkpoints.restore(program.abstract_state)
        processes.agree("the checkpoint to go on from", start)
        if start is None:
            state = program.init(processes.key(c.seed, mesh), config.hparams(c))
        if start is not None and start >= c.optim.num_steps:
            print(
                f"{directory} is finished: step {start:,} of {c.optim.num_steps:,}; "
                "--extend_to=N goes on."
            )
        else:
            if processes.is_first():  # from here on the directory holds this run
                devices = f"{mesh.size} {mesh.devices.flat[0].platform}"
                workdir.record(directory, store, start or 0, devices, changes)
                config.save(c, directory)
                _describe(store, state, mesh, exam, start)
            state = state.replace(hparams=program.place_hparams(config.hparams(c)))
            state = _train(
                c, directory, program, state, start, train_batches, exam, checkpoints
            )
        params = jax.device_get(processes.whole(state.params, mesh))
        for text in c.eval.fill_mask if processes.is_first() else ():
            filled = fill_mask(
                program.model,
                params,
                store.tokenizer,
                text,
                row_length=c.data.row_length,
            )
            print(describe(text, filled))


def _train(c, directory, program, state, start, train_batches, exam, checkpoints):
    """The loop. Evaluation and saving come before an update, so that the first step, a
    resumed one and the last take the same path. Returns the last state."""
    num_steps = c.optim.num_steps
    first = start or 0
    batches = pipeline.prefetch(train_batches, first, num_steps)
    rows_sharding = parallel.batch_sharding(exam.mesh)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(processes.StopSignal())
        if processes.is_first():
            writer = stack.enter_context(metrics.Writer(directory, start))
            progress = metrics.Progress(num_steps)
        else:
            writer = metrics.NoWriter()
            quiet = stack.enter_context(open(os.devnull, "w"))
            progress = metrics.Progress(num_steps, quiet)
        log = TrainLog(writer, progress, c)
        for step in range(first, num_steps + 1):
            stop.look(step)
            is_last = step == num_steps
            is_done = step == start  # evaluated and saved before the run was stopped
            eval_loss = None
            if not is_done and (is_last or step % c.eval.every_steps == 0):
                log.flush()
                scalars = exam.take(state, step, progress)
                writer.write(step, scalars)
                eval_loss = scalars[f"eval/loss@{c.eval.rates[0]:g}"]
            is_due = step and (is_last or step % c.checkpoint.every_steps == 0)
            if not is_done and (is_due or stop.asked):
                log.flush()  # nothing non-finite is ever saved
                checkpoints.save(
                    step, processes.whole(state, exam.mesh), eval_loss=eval_loss
                )
                progress.pause()
            if stop.asked:
                checkpoints.wait()
                processes.wait_for_all("the save")
                raise Preempted(
                    f"stopped by {stop.asked} after saving step {step:,}; "
                    "the same command resumes."
                )
            if is_last:
                return state
            with progress.waiting():
                batch = next(batches)
            state, step_metrics = program.train_step(
                state, processes.from_slices(batch, rows_sharding)
            )
            log.add(step + 1, step_metrics, batch["row"])


class TrainLog:
    """Fetches the metrics of an update while the device works on the next one.

    The update of a step that is not finite was not made; this tells of it, and stops
    the run unless the config says to skip it.
    """

    def __init__(self, writer, progress, c):
        self._writer, self._progress = writer, progress
        self._every_steps, self._num_steps = c.log.every_steps, c.optim.num_steps
        self._max_skips = c.optim.max_skips if c.optim.on_nonfinite == "skip" else 0
        self._skips = 0  # in a row, since this process began
        self._pending = None

    def add(self, step, step_metrics, row_B):
        self.flush()
        self._pending = step, step_metrics, row_B

    def flush(self):
        """Logs what is pending. Raises NonFiniteError if it is not finite, or not for
        longer than is allowed."""
        if self._pending is None:
            return
        (step, step_metrics, row_B), self._pending = self._pending, None
        step_metrics = jax.device_get(step_metrics)
        values = {name: leaf.tolist() for name, leaf in step_metrics.items()}
        self._progress.update(values["num_tokens"])
        scalars = metrics.train_scalars(values)
        is_finite = np.isfinite([values["loss"], values["grad_norm"]]).all()
        if is_finite:
            self._skips = 0
        else:
            self._skip(step, values, row_B)
            scalars["train/skipped"] = 1
        self._writer.write_ledger(step, values)
        is_due = step % self._every_steps == 0 or step == self._num_steps
        if is_due or not is_finite:
            self._writer.write(step, scalars | self._progress.speed())
            self._progress.print_line(step, scalars)

    def _skip(self, step, values, row_B):
        self._skips += 1
        what = (
            f"step {step:,}: loss {metrics.mean(values['loss'], values['weight'])}, "
            f"gradient norm {values['grad_norm']}, of rows {row_B.tolist()}"
        )
        if self._skips > self._max_skips:
            more = f", {self._skips} in a row" if self._max_skips else ""
            raise NonFiniteError(
                f"{what}{more}. The update was not made, and the checkpoints before it "
                "are sound."
            )
        self._progress.print(f"skipped {what}")


class Exam:
    """The held-out rows and the masks on them: the same for every run of a data set."""

    def __init__(self, c, store, program, mesh):
        self._c, self._program, self.mesh = c, program, mesh
        row_shards = parallel.num_row_shards(mesh)
        self.batches = pipeline.eval_batches(
            store.validation,
            num_rows=c.eval.num_rows,
            batch_size=-(-c.eval.batch_size // row_shards) * row_shards,
            pad_id=store.tokenizer.special.pad,
        )
        self.entropy = unigram_entropy(self.batches, store.tokenizer.is_special)

    def take(self, state, step, progress):
        """Returns the scalars at every rate, and prints them."""
        scalars: dict[str, float] = {}
        sharding = parallel.batch_sharding(self.mesh)
        for rate in self._c.eval.rates:
            sums = evaluate(
                self._program.eval_step,
                state.params,
                (
                    processes.from_whole(self.batches[k], sharding)
                    for k in range(len(self.batches))
                ),
                processes.key(self._c.eval.seed, self.mesh),
                eval_hparams(self._c, rate),
            )
            scalars |= metrics.eval_scalars(sums, rate)
            loss, accuracy = (
                scalars[f"eval/{n}@{rate:g}"] for n in ("loss", "accuracy")
            )
            progress.print(
                f"held-out at step {step:,}, rate {rate:g}: loss {loss:.4f} "
                f"(unigram entropy {self.entropy:.4f})  perplexity "
                f"{metrics.perplexity(loss):,.1f}  accuracy {accuracy:.2%}"
            )
        progress.pause()
        return scalars


def _describe(store, state, mesh, exam, start):
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    begin = "starts" if start is None else f"resumes at step {start:,}"
    print(
        f"{begin}: {num_params:,} parameters, {len(store.train):,} rows of "
        f"{store.row_length} tokens, {len(store.validation):,} held out, "
        f"vocabulary {store.tokenizer.vocab_size:,}, {mesh.size} "
        f"{mesh.devices.flat[0].platform} device(s), "
        f"huge pages {'on' if huge_pages.are_asked_for() else 'off'}, "
        f"unigram entropy {exam.entropy:.4f}"
    )


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
    run(c, WORKDIR.value, allowed=allowed)


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main)
