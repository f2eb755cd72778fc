"""Trains a masked language model.

    python -m mlm_jax.train --config=configs/tiny.py --workdir=runs/tiny \
        --config.corruption.rate=0.4

Prepares the data, trains, evaluates on held-out text, saves checkpoints, and ends by
filling masks. The same command again resumes where the run stopped.
"""

import pathlib
import signal

import jax
import numpy as np

from mlm_jax import checkpoint, command, config, huge_pages, metrics, parallel
from mlm_jax.data import pipeline, rows
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError, NonFiniteError, Preempted
from mlm_jax.evaluate import evaluate, unigram_entropy
from mlm_jax.program import eval_hparams, make_program
from mlm_jax.tasks.fill_mask import describe, fill_mask

CONFIG = command.define_config()
WORKDIR = command.define_workdir("where the run is kept, and resumed from")


def run(c, workdir):
    """Trains config `c` to its last step, from where an earlier call stopped.

    Raises InputError before any compilation for what cannot work, NonFiniteError for a
    loss or gradient that is not a number, Preempted after saving on SIGTERM or SIGINT.
    """
    config.check(c)
    sizes = config.check_devices(c, jax.local_device_count())
    workdir = _open_workdir(workdir, c)
    store = rows.prepare(c.data, c.tokenizer)
    _keep_tokenizer(workdir, store.tokenizer)
    config.save(c, workdir)  # from here on the workdir holds this run

    mesh = parallel.make_mesh(sizes)
    program = make_program(c, store.tokenizer, store.token_counts, mesh)
    train_batches = pipeline.TrainBatches(
        store.train, batch_size=c.data.batch_size, seed=c.seed
    )
    exam = Exam(c, store, program, sizes["data"] * sizes["fsdp"])

    with checkpoint.Checkpoints(workdir, keep=c.checkpoint.keep) as checkpoints:
        start = checkpoints.latest_step()
        if start is None:
            state = program.init(jax.random.key(c.seed), config.hparams(c))
        else:
            state = checkpoints.restore(start, program.abstract_state)
        if start == c.optim.num_steps:
            print(f"{workdir} is finished: step {start:,} of {c.optim.num_steps:,}.")
        else:
            _describe(store, state, mesh, exam, start)
            state = _train(
                c, workdir, program, state, start, train_batches, exam, checkpoints
            )
        for text in c.eval.fill_mask:
            filled = fill_mask(
                program.model,
                state.params,
                store.tokenizer,
                text,
                row_length=c.data.row_length,
            )
            print(describe(text, filled))


def _train(c, workdir, program, state, start, train_batches, exam, checkpoints):
    """The loop. Evaluation and saving come before an update, so that the first step, a
    resumed one and the last take the same path. Returns the last state."""
    num_steps = c.optim.num_steps
    first = start or 0
    batches = pipeline.prefetch(train_batches, first, num_steps)
    progress = metrics.Progress(num_steps)
    with metrics.Writer(workdir, start) as writer, StopSignal() as stop:
        log = TrainLog(writer, progress, c.log.every_steps, num_steps)
        for step in range(first, num_steps + 1):
            is_last = step == num_steps
            is_done = step == start  # evaluated and saved before the run was stopped
            if not is_done and (is_last or step % c.eval.every_steps == 0):
                log.flush()
                writer.write(step, exam.take(state, step, progress))
            is_due = step and (is_last or step % c.checkpoint.every_steps == 0)
            if not is_done and (is_due or stop.asked):
                log.flush()  # nothing non-finite is ever saved
                checkpoints.save(step, state)
                progress.pause()
            if stop.asked:
                raise Preempted(
                    f"stopped by {stop.asked} after saving step {step:,}; "
                    "the same command resumes."
                )
            if is_last:
                return state
            with progress.waiting():
                batch = next(batches)
            state, step_metrics = program.train_step(state, batch)
            log.add(step + 1, step_metrics)


class TrainLog:
    """Fetches the metrics of an update while the device works on the next one."""

    def __init__(self, writer, progress, every_steps, num_steps):
        self._writer, self._progress = writer, progress
        self._every_steps, self._num_steps = every_steps, num_steps
        self._pending = None

    def add(self, step, step_metrics):
        self.flush()
        self._pending = step, step_metrics

    def flush(self):
        """Logs what is pending. Raises NonFiniteError if it is not finite."""
        if self._pending is None:
            return
        (step, step_metrics), self._pending = self._pending, None
        step_metrics = jax.device_get(step_metrics)
        values = {name: leaf.tolist() for name, leaf in step_metrics.items()}
        self._progress.update(values["num_tokens"])
        scalars = metrics.train_scalars(values)
        if not np.isfinite([values["loss"], values["grad_norm"]]).all():
            raise NonFiniteError(
                f"step {step:,}: loss sum {values['loss']}, gradient norm "
                f"{values['grad_norm']}. The checkpoints before it are sound."
            )
        self._writer.write_ledger(step, values)
        if step % self._every_steps == 0 or step == self._num_steps:
            self._writer.write(step, scalars | self._progress.speed())
            self._progress.print_line(step, scalars)


class Exam:
    """The held-out rows and the masks on them: the same for every run of a data set."""

    def __init__(self, c, store, program, row_devices):
        self._c, self._program = c, program
        self.batches = pipeline.eval_batches(
            store.validation,
            num_rows=c.eval.num_rows,
            batch_size=-(-c.eval.batch_size // row_devices) * row_devices,
            pad_id=store.tokenizer.special.pad,
        )
        self.entropy = unigram_entropy(self.batches, store.tokenizer.is_special)

    def take(self, state, step, progress):
        """Returns the scalars at every rate, and prints them."""
        scalars: dict[str, float] = {}
        for rate in self._c.eval.rates:
            sums = evaluate(
                self._program.eval_step,
                state.params,
                self.batches,
                jax.random.key(self._c.eval.seed),
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


class StopSignal:
    """Turns SIGTERM and SIGINT into a flag that the loop reads between two steps."""

    def __init__(self):
        self.asked = None

    def __enter__(self):
        self._previous = {
            number: signal.signal(number, self._ask)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *exc_info):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        del frame
        self.asked = signal.Signals(number).name


def _open_workdir(workdir, c):
    """Makes the directory. Raises InputError if it cannot be written, or if it holds a
    run with another config."""
    workdir = pathlib.Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if (workdir / "config.json").exists():
            config.check_unchanged(config.load(workdir), c)
    except OSError as error:
        raise InputError(f"--workdir={workdir} cannot be written: {error}") from error
    return workdir


def _keep_tokenizer(workdir, tokenizer):
    """Saves the tokenizer with the run. Raises InputError if it has another one."""
    path = workdir / "tokenizer.json"
    if not path.exists():
        tokenizer.save(path)
    elif Tokenizer.load(path).digest != tokenizer.digest:
        raise InputError(
            f"{path} differs from the tokenizer of the data: the source's content has "
            "changed since the run began. Use another --workdir."
        )


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
    run(CONFIG.value, WORKDIR.value)


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main)
