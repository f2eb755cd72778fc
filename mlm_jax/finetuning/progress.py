"""Lines while trials are trained: where they are, the rate, and the time left."""

import time

from mlm_jax.data.progress import duration

EVERY = 5.0  # seconds between two lines inside an epoch


class Log:
    """A line an epoch of a trial, and one about every five seconds in between.

    The time left is that of trials which use all of their epochs: early stopping makes
    it less.
    """

    def __init__(self, num_trials, num_steps, metric):
        self._left, self._num_steps, self._metric = num_trials, num_steps, metric
        self._steps = self._in_trial = 0
        self._begin = self._printed = 0.0

    def step(self, trials):
        """Counts an update of each of `trials`; the first one of all was compiled."""
        now = time.perf_counter()
        if not self._begin:
            self._begin = self._printed = now
            return
        self._steps += len(trials)
        self._in_trial += len(trials)
        if now - self._printed >= EVERY:
            names = ", ".join(trial.name for trial in trials)
            step = self._in_trial // len(trials) + 1
            self._print(f"{names} step {step:,} of at most {self._num_steps:,}")

    def epoch(self, epoch, tracks):
        """Prints how the trials stand after an epoch."""
        for track in tracks:
            last = track.history[-1]
            if last["epoch"] == epoch:
                self._print(
                    f"{track.trial.name} epoch {epoch}: train loss "
                    f"{last['train_loss']:.4f}, validation {self._metric} "
                    f"{last['validation'][self._metric]:.4f}"
                )

    def end(self, trials):
        """Counts `trials` as done, early or not."""
        self._left -= len(trials)
        self._in_trial = 0

    def _print(self, text):
        self._printed = time.perf_counter()
        seconds = self._printed - self._begin
        rate = self._steps / seconds if self._steps else float("nan")
        rest = self._left * self._num_steps - self._in_trial
        print(
            f"{text}; {rate:.1f} steps/s, at most {duration(rest / rate)} left",
            flush=True,
        )
