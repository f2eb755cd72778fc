"""Trials: a learning rate and a seed each, trained until validation stops improving."""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlm_jax import optim, population
from mlm_jax.data.pipeline import permutation
from mlm_jax.errors import Preempted
from mlm_jax.finetuning import encoder, reading, step
from mlm_jax.finetuning.problem import score
from mlm_jax.tasks.reader import bucket


class Trial(NamedTuple):
    learning_rate: float
    seed: int

    @property
    def name(self):
        return f"lr{self.learning_rate!r}_seed{self.seed}"


class Outcome(NamedTuple):
    """What a trial has come to: facts ready to be JSON, and the parameters of its best
    epoch, on the host."""

    facts: dict
    params: Any


def batch_of(columns, ids_B, batch_size, epoch):
    """Returns rows `ids_B` as a batch, filled up with rows of weight 0."""
    missing = batch_size - len(ids_B)
    batch = {
        name: np.pad(column[ids_B], [(0, missing)] + [(0, 0)] * (column.ndim - 1))
        for name, column in columns.items()
        if name != "example"
    }
    batch["row"] = np.pad(ids_B, (0, missing)).astype(np.int32)
    batch["epoch"] = np.full(batch_size, epoch, np.int32)
    return batch


def cut(batch, length):
    """Returns a batch with the columns that are as long as a row cut to `length`."""
    row_length = batch["tokens"].shape[1]

    def shorter(x):
        return x[:, :length] if x.ndim > 1 and x.shape[1] == row_length else x

    return {name: shorter(column) for name, column in batch.items()}


def train_batches(columns, batch_size, seed, epoch):
    """Yields the batches of an epoch: every row once, in an order that is a function of
    (seed, epoch)."""
    order = permutation(len(columns["example"]), seed, epoch)
    for first in range(0, len(order), batch_size):
        yield batch_of(columns, order[first : first + batch_size], batch_size, epoch)


class Trainer:
    """The compiled functions of a problem; trains `together` trials at once."""

    def __init__(self, c, problem, trained, together=1):
        self._c, self._problem, self._trained = c, problem, trained
        self.model = encoder.make_model(
            trained, problem, pooling=c.pooling, dropout=c.dropout
        )
        self._init = jax.jit(
            functools.partial(step.init, self.model, row_length=problem.row_length)
        )
        self._optimizer = optim.OPTIMIZERS[c.optim.name]
        update = step.make_update(
            self.model,
            problem.kind,
            optimizer=self._optimizer,
            schedule=c.optim.schedule,
        )
        self._together = together
        if together == 1:
            self._update = jax.jit(update, donate_argnums=0)
        else:
            self._population = population.make_step(update, together)
            self._update = self._population.update
        self._predict = step.make_predict(self.model, problem.kind)
        num_rows = problem.rows["train"].num_rows
        self.num_steps = -(-num_rows // c.batch_size) * c.num_epochs

    def init(self, seed):
        """Returns the parameters before the first update."""
        params = self._init(seed)
        if self._c.weights == "random":
            return params
        return encoder.with_encoder(params, self._trained)

    def describe(self):
        """Returns a line about what is loaded and what is new; computes nothing."""
        params = jax.eval_shape(self._init, 0)
        if self._c.weights == "run":
            encoder.with_encoder(params, self._trained)
        return encoder.describe(params, self._trained, self._c.weights)

    def evaluate(self, params, split):
        """Returns (scores, with the mean `loss`; the predictions) of a split."""
        columns = self._problem.rows[split].columns
        size = self._c.batch_size
        # Short rows meet short ones, so that there is less padding.
        length_N = (columns["segment"] > 0).sum(1)
        ids_N = np.argsort(length_N, kind="stable")
        found = []
        for first in range(0, len(ids_N), size):
            ids_B = ids_N[first : first + size]
            length = bucket(int(length_N[ids_B].max()), self._problem.row_length)
            batch = batch_of(columns, ids_B, size, 0)
            found.append(self._predict(params, cut(batch, length)))
        answers, losses, weights = zip(*jax.device_get(found), strict=True)
        answers = self._in_order(answers, ids_N)
        predictions = reading.predictions(self._problem, split, answers)
        scores = score(self._problem, split, predictions)
        # Summed in 64 bits: the size of a batch does not show.
        loss, weight = (np.sum(x, dtype=np.float64) for x in (losses, weights))
        scores["loss"] = float(loss / weight)
        return scores, predictions

    def train(self, trials, stop, log):
        """Returns the Outcomes of as many trials as are trained together, or fewer.

        Raises Preempted when asked to stop; nothing of these trials is kept then.
        """
        c, problem = self._c, self._problem
        begin = time.perf_counter()
        places = list(trials) + [trials[0]] * (self._together - len(trials))
        states = self._stack(
            [
                step.make_state(
                    self.init(trial.seed),
                    trial.seed,
                    step.hparams(c, trial.learning_rate, self.num_steps),
                    self._optimizer,
                )
                for trial in places
            ]
        )
        tracks = [Track(trial, problem.metric, c.patience) for trial in trials]
        for epoch in range(1, c.num_epochs + 1):
            per_seed = [
                train_batches(
                    problem.rows["train"].columns, c.batch_size, trial.seed, epoch
                )
                for trial in places
            ]
            sums = []
            for batches in zip(*per_seed, strict=True):
                if stop.asked:
                    raise Preempted(
                        f"stopped by {stop.asked}; the finished trials are kept, and "
                        "the same command makes the others."
                    )
                states, new = self._update(states, self._stack_host(batches))
                sums.append(new)
                log.step(trials)
            sums = jax.tree.map(
                lambda *x: np.sum(x, 0, np.float64), *jax.device_get(sums)
            )
            for i, track in enumerate(tracks):
                if not track.is_over:
                    pick = self._pick(i)
                    loss = float(pick(sums["loss"]) / pick(sums["weight"]))
                    params = jax.tree.map(pick, states.params)
                    scores, _ = self.evaluate(params, "validation")
                    track.add(epoch, loss, scores, params)
            log.epoch(epoch, tracks)
            if all(track.is_over for track in tracks):
                break
        log.end(trials)
        seconds = time.perf_counter() - begin
        outcomes = []
        for track in tracks:
            facts = track.facts() | {"seconds": seconds / len(tracks)}
            if "test" in problem.rows and track.params is not None:
                facts["test"], _ = self.evaluate(track.params, "test")
            outcomes.append(Outcome(facts, track.params))
        return outcomes

    def _in_order(self, batches, ids_N):
        """Returns what batches hold of all rows; 0 past the end of a short batch."""
        if self._problem.per_token:
            length = self._problem.row_length
            batches = [
                np.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
                for x in batches
            ]
        found = np.concatenate(batches)[: len(ids_N)]  # without what filled a batch
        return found[np.argsort(ids_N)]

    def _stack(self, states):
        if self._together == 1:
            return states[0]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
        return jax.device_put(stacked, self._population.sharding)

    def _stack_host(self, batches):
        if self._together == 1:
            return batches[0]
        return {name: np.stack([b[name] for b in batches]) for name in batches[0]}

    def _pick(self, i):
        return (lambda x: x) if self._together == 1 else (lambda x: x[i])


class Track:
    """The epochs of a trial: the best one so far, and whether to go on.

    A trial whose loss is not finite is over; so is one that has not improved for
    `patience` epochs. Of equal epochs the first one is the best.
    """

    def __init__(self, trial, metric, patience):
        self.trial, self._metric, self._patience = trial, metric, patience
        self.history, self.params, self.is_over = [], None, False
        self._best, self._best_epoch = -math.inf, 0

    def add(self, epoch, loss, scores, params):
        self.history.append({"epoch": epoch, "train_loss": loss, "validation": scores})
        if not math.isfinite(loss):
            self.is_over, self.params, self._best_epoch = True, None, 0
            return
        value = scores[self._metric]
        # NaN is no score: it is never better, and the first epoch counts all the same.
        if value > self._best or self.params is None:
            self._best = value if value == value else -math.inf
            self._best_epoch = epoch
            # A copy: the next update is given the device's buffer to overwrite.
            self.params = jax.tree.map(np.array, params)
        self.is_over = epoch - self._best_epoch >= self._patience

    def facts(self):
        best = self.history[self._best_epoch - 1] if self._best_epoch else None
        return {
            "learning_rate": self.trial.learning_rate,
            "seed": self.trial.seed,
            "state": "diverged" if self.params is None else "finished",
            "best_epoch": self._best_epoch,
            "validation": best and best["validation"],
            "test": None,
            "history": self.history,
        }
