"""Sums to scalars, and where they go: metrics.jsonl, TensorBoard, a progress line."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from mlm_jax.data.progress import duration
from mlm_jax.errors import InputError
from mlm_jax.files import finite, write_text


def mean(total, count):
    """Returns total / count; NaN where nothing was counted."""
    return total / count if count else math.nan


def perplexity(loss):
    """exp of the mean loss in nats; inf where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def train_scalars(metrics):
    """Returns {"train/…": number} of one update's sums.

    An update without any prediction has no loss and no accuracy.
    """
    num_masked, num_hidden = metrics["num_masked"], metrics["num_hidden"]
    scalars = {
        "num_masked": int(num_masked),
        "mask_rate": mean(num_hidden, metrics["num_maskable"]),
        "mask_hash": int(metrics["mask_hash"]),
        "mask_token_share": mean(metrics["num_mask_tokens"], num_hidden),
        "random_token_share": mean(metrics["num_random_tokens"], num_hidden),
        "unit_length": mean(num_hidden, sum(metrics["unit_lengths"])),
        "overflow": int(metrics["num_overflow"]),
        "learning_rate": metrics["learning_rate"],
        "grad_norm": metrics["grad_norm"],
    }
    if num_masked:
        scalars["loss"] = mean(metrics["loss"], metrics["weight"])
        scalars["accuracy"] = mean(metrics["num_correct"], metrics["weight"])
    return {f"train/{name}": value for name, value in scalars.items()}


def eval_scalars(sums, rate):
    """Returns {"eval/…@rate": number} of the sums over an evaluation set."""
    loss = mean(sums["loss"], sums["weight"])
    scalars = {
        "loss": loss,
        "perplexity": perplexity(loss),
        "accuracy": mean(sums["num_correct"], sums["weight"]),
        "top5": mean(sums["num_top5"], sums["weight"]),
        "num_masked": int(sums["num_masked"]),
        "mask_hash": int(sums["mask_hash"]),
    }
    return {f"eval/{name}@{rate:g}": value for name, value in scalars.items()}


LEDGER = (
    "mask_hash",
    "num_maskable",
    "num_hidden",
    "num_masked",
    "num_mask_tokens",
    "num_random_tokens",
    "num_kept_tokens",
    "num_overflow",
    "unit_lengths",
)


class JsonLines:
    """A file of one JSON object a line, each with its `step`.

    A run that resumes at `start_step` has made nothing after it, and one that starts
    (None) nothing at all: other lines are dropped, so that each step is there once,
    resumed or not. Raises InputError for a file with something else in it, and when it
    cannot be written.
    """

    def __init__(self, path, start_step):
        self._path = path
        is_resumed = start_step is not None and path.exists()
        lines = read_json_lines(path) if is_resumed else []
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= start_step]
        with refuse_unwritable(self._path):
            write_text(path, "".join(kept))
            self._file = path.open("a")

    def write(self, step, values):
        with refuse_unwritable(self._path):
            self._file.write(json.dumps({"step": step} | values) + "\n")
            self._file.flush()

    def sync(self):
        with refuse_unwritable(self._path):
            os.fsync(self._file.fileno())

    def close(self):
        with contextlib.suppress(OSError):  # what `write` has told of
            self._file.close()


def read_json_lines(path):
    """Returns the objects of a file of `JsonLines`, without a last line cut short.

    Raises InputError, naming the line, for any other that was not written so.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines[:-1], 1):  # after the last end is no line
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int):
                raise TypeError("its step is no number")
            found.append(values)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number} is damaged ({error}); remove the line."
            ) from error
    return found


class Events:
    """Scalars for TensorBoard, on the disk when `write` returns.

    `tensorboardX.SummaryWriter` writes in a thread: when a full disk has ended that,
    it waits for ever.
    """

    def __init__(self, folder, start_step):
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        first = 0 if start_step is None else start_step + 1
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first, session_log=start)  # hides what a killed run drew after

    def write(self, step, scalars):
        values = [
            summary_pb2.Summary.Value(tag=name.replace("@", "_"), simple_value=value)
            for name, value in scalars.items()
        ]
        self._write(step=step, summary=summary_pb2.Summary(value=values))
        self._writer.flush()

    def _write(self, **fields):
        self._writer.write_event(event_pb2.Event(wall_time=time.time(), **fields))

    def close(self):
        self._writer.close()


class Writer:
    """Scalars to `metrics.jsonl`, one object a step and kind, and to TensorBoard; what
    the corruption did at each step to `ledger.jsonl`.

    Raises InputError when they cannot be written, or resumed.
    """

    def __init__(self, workdir, start_step):
        workdir = pathlib.Path(workdir)
        self._metrics = JsonLines(workdir / "metrics.jsonl", start_step)
        self._ledger = JsonLines(workdir / "ledger.jsonl", start_step)
        self._folder = workdir / "tensorboard"
        with refuse_unwritable(self._folder):
            self._events = Events(self._folder, start_step)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._metrics.close()
        self._ledger.close()
        with contextlib.suppress(OSError):  # what `write` has told of
            self._events.close()

    def write(self, step, scalars):
        self._metrics.write(step, finite(scalars))
        with refuse_unwritable(self._folder):
            self._events.write(step, scalars)

    def sync(self):
        """Puts the lines on the disk, ahead of the checkpoint that relies on them."""
        self._metrics.sync()
        self._ledger.sync()

    def write_ledger(self, step, sums):
        self._ledger.write(step, {name: sums[name] for name in LEDGER})


@contextlib.contextmanager
def refuse_unwritable(path):
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}. Checkpoints stay; once it "
            "can, the same command goes on."
        ) from error


class NoWriter:
    """That of a process which is not the first: all of them have the same numbers."""

    def write(self, step, scalars):
        pass

    def write_ledger(self, step, sums):
        pass

    def sync(self):
        pass


class Progress:
    """One line: step, loss, accuracy, tokens a second, time left.

    On a terminal the line is rewritten in place; elsewhere a new one is printed at most
    every five seconds.
    """

    def __init__(self, num_steps, stream=sys.stdout):
        self._num_steps = num_steps
        self._stream = stream
        self._in_place = stream.isatty()
        self._printed = -math.inf
        self._steps = self._tokens = 0
        self._seconds = self._waited = 0.0
        self.pause()

    def pause(self):
        """Leaves the time from here to the next update out of every rate."""
        self._since = None

    def update(self, num_tokens):
        """Counts one more update."""
        now = time.perf_counter()
        if self._since is not None:
            self._steps += 1
            self._tokens += num_tokens
            self._seconds += now - self._since
        self._since = now

    @contextlib.contextmanager
    def waiting(self):
        """Counts what is done inside as waiting for input."""
        begin = time.perf_counter()
        yield
        if self._since is not None:
            self._waited += time.perf_counter() - begin

    def speed(self):
        """Returns `train/tokens_per_second`, and `train/input_wait`, the share of the
        time spent waiting for rows; nothing before they are known."""
        if not self._steps:
            return {}
        return {
            "train/tokens_per_second": self._tokens / self._seconds,
            "train/input_wait": self._waited / self._seconds,
        }

    def line(self, step, scalars):
        left = mean(self._seconds, self._steps) * (self._num_steps - step)
        text = f"step {step:,}/{self._num_steps:,}"
        if "train/loss" in scalars:
            loss, accuracy = scalars["train/loss"], scalars["train/accuracy"]
            text += f"  loss {loss:.3f}  accuracy {accuracy:.1%}"
        if speed := self.speed():
            tokens_per_second = speed["train/tokens_per_second"]
            text += f"  {tokens_per_second:,.0f} tokens/s  {duration(left)} left"
        return text

    def print_line(self, step, scalars):
        now = time.perf_counter()
        if self._in_place:
            self._show(f"\r\x1b[K{self.line(step, scalars)}", end="")
        elif now - self._printed >= 5 or step == self._num_steps:
            self._show(self.line(step, scalars))
            self._printed = now

    def print(self, text):
        """Prints a line of its own, above the progress line."""
        start = "\r\x1b[K" if self._in_place else ""
        self._show(f"{start}{text}")

    def _show(self, text, end="\n"):
        # No run ends because no one listens, or the log's disk is full.
        with contextlib.suppress(OSError):
            print(text, end=end, file=self._stream, flush=True)
