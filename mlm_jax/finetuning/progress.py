"""Lines while trials are trained: where they are, the rate, and the time left."""

import time

from mlm_jax import metrics


class Log:
    """One line an epoch of a trial.

    The time left is that of trials which use all of their epochs: early stopping makes
    it less.
    """

    def __init__(self, num_trials, num_steps, metric):
        self._left, self._num_steps, self._metric = num_trials, num_steps, metric
        self._steps = self._in_trial = 0
        self._begin = 0.0

    def step(self, trials):
        """Counts an update of each of `trials`, which were compiled by the first."""
        if not self._begin:
            self._begin = time.perf_counter()
            return
        self._steps += len(trials)
        self._in_trial += 1

    def epoch(self, epoch, tracks):
        """Prints how the trials stand after an epoch."""
        seconds = time.perf_counter() - self._begin
        rate = self._steps / max(seconds, 1e-9)
        rest = self._left * self._num_steps - self._in_trial * len(tracks)
        left = metrics.duration(max(rest, 0) / rate) if rate else "?"
        for track in tracks:
            if track.history[-1]["epoch"] != epoch:
                continue
            last = track.history[-1]
            print(
                f"{track.trial.name} epoch {epoch}: train loss "
                f"{last['train_loss']:.4f}, validation {self._metric} "
                f"{last['validation'][self._metric]:.4f}"
                f"{', over' if track.is_over else ''}; {rate:.1f} steps/s, at most "
                f"{left} left",
                flush=True,
            )
        if all(track.is_over for track in tracks) or rest <= (
            (self._left - len(tracks)) * self._num_steps
        ):
            self._left -= len(tracks)
            self._in_trial = 0
