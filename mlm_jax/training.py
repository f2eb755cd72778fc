"""A run in its directory: what happens between two updates, whoever makes them.

`Training` restores, evaluates, saves and logs; `drive` makes the updates of one run.
"""

import contextlib
import functools
import os
import sys

import jax
import numpy as np

from mlm_jax import (
    checkpoint,
    config,
    huge_pages,
    initial,
    metrics,
    parallel,
    processes,
    workdir,
)
from mlm_jax.data import pipeline
from mlm_jax.errors import CheckpointError, NonFiniteError, Preempted
from mlm_jax.held_out import evaluate, unigram_entropy
from mlm_jax.program import eval_hparams
from mlm_jax.tasks import minimal_pairs
from mlm_jax.tasks.reader import Reader

# How long a thread that reads or saves may hold up the one that feeds the device. With
# Python's 5 ms a step of 6 ms takes 10, and while a checkpoint is written 30.
SWITCH_SECONDS = 1e-4

# Of the updates: more than these that were not made are no accident.
MAX_SKIPPED = 0.01


class Training:
    """Config `c` in `directory`, from where an earlier call stopped up to step `until`,
    by default the last.

    `start` is the step it goes on from, None if it begins. `get_state()` returns where
    it is, which whoever makes the updates keeps.
    """

    def __init__(self, c, directory, store, program, mesh, *, changes=(), until=None):
        self.c, self.directory, self.mesh = c, directory, mesh
        self.until = c.optim.num_steps if until is None else until
        self._store, self._program, self._changes = store, program, changes
        self._exam = Exam(c, store, program, mesh)
        self._checkpoints = checkpoint.Checkpoints(
            directory,
            keep=c.checkpoint.keep,
            keep_best=c.checkpoint.keep_best,
            keep_every=c.checkpoint.keep_every,
        )
        saved = _without_hparams(program.abstract_state)
        self.start, state = self._checkpoints.restore(saved)
        processes.agree("the checkpoint to go on from", self.start)
        if self.start is None:
            _refuse_to_start_over(directory)
            key = processes.key(c.seed, mesh)
            params = {}
            if c.init_from is not None:  # refused, if it is, before compiling
                abstract_params = program.abstract_state.params
                params = {"params": initial.load(c, directory, abstract_params)}
            state = program.init(key, config.hparams(c)).replace(**params)
        else:
            numbers = program.place_hparams(config.hparams(c))
            state = state.replace(hparams=numbers)
        self.keep(state)

    def keep(self, state):
        self.get_state = lambda: state

    @property
    def is_finished(self):
        return self.start is not None and self.start >= self.until

    def batches(self):
        """Returns the rows of every step, of which each process reads a slice."""
        return pipeline.TrainBatches(
            self._store.train,
            batch_size=self.c.data.batch_size,
            seed=self.c.seed,
            ramp=self.c.data.batch_ramp,
            process_index=jax.process_index(),
            num_processes=jax.process_count(),
            pad_id=self._store.tokenizer.special.pad,
            max_bad_rows=self.c.data.max_bad_rows,
        )

    def updates(self, batches, stop):
        """Yields the batch of each update; is to be sent a function that fetches the
        update's metrics, when `get_state` has the state after it.

        Evaluation and saving come before an update, so that the first step, a resumed
        one and the last take the same path. Raises Preempted after saving when `stop`
        was asked.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        with self._checkpoints as checkpoints, contextlib.ExitStack() as stack:
            self._record()
            if processes.is_first():
                writer = stack.enter_context(metrics.Writer(self.directory, self.start))
                progress = metrics.Progress(self.until)
            else:
                writer = metrics.NoWriter()
                quiet = stack.enter_context(open(os.devnull, "w"))
                progress = metrics.Progress(self.until, quiet)
            log = TrainLog(writer, progress, self.c)
            for step in range(self.start or 0, self.until + 1):
                stop.look(step)
                self._between(step, log, writer, progress, checkpoints, stop)
                if step == self.until:
                    return
                checkpoints.check()  # what cannot be saved is not trained on
                with progress.waiting():
                    batch = next(batches)
                fetch_metrics = yield batch
                log.add(step + 1, fetch_metrics, batch["row"])

    def _between(self, step, log, writer, progress, checkpoints, stop):
        """Evaluates, saves and stops, if it is time to, before update `step + 1`."""
        every = self.c.eval.every_steps, self.c.checkpoint.every_steps
        is_last = step == self.until
        is_done = step == self.start  # evaluated and saved before the run was stopped
        eval_loss = None
        if not is_done and (is_last or step % every[0] == 0):
            log.flush()
            scalars = self._exam.take(self.get_state(), step, progress)
            writer.write(step, scalars)
            eval_loss = scalars[f"eval/loss@{self.c.eval.rates[0]:g}"]
        is_due = step and (is_last or step % every[1] == 0)
        if not is_done and (is_due or stop.asked):
            log.flush()  # nothing non-finite is ever saved
            writer.sync()
            state = processes.whole(_without_hparams(self.get_state()), self.mesh)
            checkpoints.save(step, state, eval_loss=eval_loss)
            progress.pause()
        if is_last or stop.asked:
            checkpoints.wait()
        if stop.asked:
            processes.wait_for_all("the save")
            raise Preempted(
                f"stopped by {stop.asked} after saving step {step:,}; "
                "the same command resumes."
            )

    def _record(self):
        """From here on the directory holds this run."""
        if not processes.is_first():
            return
        mesh, store = self.mesh, self._store
        platform = mesh.devices.flat[0].platform
        devices = f"{mesh.size} {platform}"
        workdir.record(self.directory, store, self.start or 0, devices, self._changes)
        config.save(self.c, self.directory)
        num_params = sum(
            leaf.size for leaf in jax.tree.leaves(self._program.abstract_state.params)
        )
        begin = "starts" if self.start is None else f"resumes at step {self.start:,}"
        print(
            f"{begin}: {num_params:,} parameters, {len(store.train):,} rows of "
            f"{store.row_length} tokens, {len(store.validation):,} held out, "
            f"vocabulary {store.tokenizer.vocab_size:,}, {mesh.size} {platform} "
            f"device(s), huge pages {'on' if huge_pages.are_asked_for() else 'off'}, "
            f"unigram entropy {self._exam.entropy:.4f}"
        )


def drive(training, train_step, stop):
    """Makes the updates of one run."""
    rows_sharding = parallel.batch_sharding(training.mesh)
    first = training.start or 0
    batches = pipeline.prefetch(training.batches(), first, training.until)
    updates = training.updates(batches, stop)
    batch = next(updates, None)
    while batch is not None:
        state, step_metrics = train_step(
            training.get_state(), processes.from_slices(batch, rows_sharding)
        )
        training.keep(state)
        try:
            batch = updates.send(functools.partial(jax.device_get, step_metrics))
        except StopIteration:
            batch = None


def _without_hparams(state):
    """What is saved: a run has its numbers from its config, and may go on with more of
    them than there were."""
    return state.replace(hparams={})


def _refuse_to_start_over(directory):
    """Raises CheckpointError for a run that has logged steps after its first save: its
    checkpoints are elsewhere, and to start over would drop what it has logged."""
    ledger = directory / "ledger.jsonl"
    if not (workdir.has_begun(directory) and ledger.exists()):
        return
    logged = max((line["step"] for line in metrics.read_json_lines(ledger)), default=0)
    # A save has ended when the next one begins.
    if logged > 2 * config.load(directory).checkpoint.every_steps:
        raise CheckpointError(
            f"{directory} has logged step {logged:,}, and has no checkpoint: put them "
            "back; a new --workdir starts afresh."
        )


class TrainLog:
    """Fetches the metrics of an update while the device works on the next one.

    The update of a step that is not finite, or a spike, was not made; this tells of it,
    and stops the run if the config does not say to skip it, or after too many.
    """

    def __init__(self, writer, progress, c):
        self._writer, self._progress = writer, progress
        self._every_steps, self._num_steps = c.log.every_steps, c.optim.num_steps
        self._max_skips = c.optim.max_skips
        self._stops = c.optim.on_nonfinite == "stop"
        # Since this process began: all updates, those skipped, the last in a row.
        self._updates = self._skipped = self._in_row = 0
        self._pending = None

    def add(self, step, fetch_metrics, row_B):
        self.flush()
        self._pending = step, fetch_metrics, row_B

    def flush(self):
        """Logs what is pending. Raises NonFiniteError if it is not finite, or not for
        longer than is allowed."""
        if self._pending is None:
            return
        (step, fetch_metrics, row_B), self._pending = self._pending, None
        values = {name: leaf.tolist() for name, leaf in fetch_metrics().items()}
        self._progress.update(values["num_tokens"])
        self._updates += 1
        scalars = metrics.train_scalars(values)
        is_finite = np.isfinite([values["loss"], values["grad_norm"]]).all()
        is_made = is_finite and not values.get("is_spike")
        if is_made:
            self._in_row = 0
        else:
            self._skip(step, values, row_B, is_spike=is_finite)
            scalars["train/skipped"] = 1
        self._writer.write_ledger(step, values)
        is_due = step % self._every_steps == 0 or step == self._num_steps
        if is_due or not is_made:
            self._writer.write(step, scalars | self._progress.speed())
            self._progress.print_line(step, scalars)

    def _skip(self, step, values, row_B, *, is_spike):
        self._skipped += 1
        self._in_row += 1
        what = (
            f"{'spike at ' if is_spike else ''}step {step:,}: "
            f"loss {metrics.mean(values['loss'], values['weight'])}, "
            f"gradient norm {values['grad_norm']}, of rows {row_B.tolist()}"
        )
        max_skipped = max(self._max_skips, MAX_SKIPPED * self._updates)
        is_refused = self._stops and not is_spike
        if is_refused or self._in_row > self._max_skips or self._skipped > max_skipped:
            raise NonFiniteError(
                f"{what}, {self._in_row} in a row and {self._skipped} of "
                f"{self._updates:,} since the start. The update was not made, and the "
                "checkpoints before it are sound."
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
        self._pairs: list[minimal_pairs.Pair] = []
        if c.eval.minimal_pairs is not None:
            self._pairs = minimal_pairs.read(c.eval.minimal_pairs)
            self._reader = Reader(
                program.model,
                None,
                store.tokenizer,
                mesh,
                row_length=c.data.row_length,
                place=lambda batch: processes.from_whole(
                    batch, parallel.batch_sharding(mesh)
                ),
            )
            self._sentences = minimal_pairs.encode(self._reader, self._pairs)

    def take(self, state, step, progress):
        """Returns the scalars at every rate, and prints them. Raises NonFiniteError if
        the last updates have left parameters that are finite and make no finite loss.
        """
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
            if sums["num_masked"] and not np.isfinite(loss):
                raise NonFiniteError(
                    f"step {step:,}: the held-out loss at rate {rate:g} is {loss}. The "
                    "checkpoints before it are sound."
                )
        if self._pairs:
            scalars |= self._judge_pairs(state, step, progress)
        progress.pause()
        return scalars

    def _judge_pairs(self, state, step, progress):
        self._reader.params = state.params
        judged = minimal_pairs.judge(self._reader, self._sentences)
        _, overall = minimal_pairs.accuracies(self._pairs, judged)
        progress.print(
            f"minimal pairs at step {step:,}: {overall.share:.1%} of {overall.pairs:,} "
            f"right, {overall.ties:,} ties"
        )
        return {"eval/minimal_pairs": overall.share}
