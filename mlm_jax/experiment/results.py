"""What the runs of an experiment have written: curves, last values, and their state.

A run is a directory `DIR/<arm>/seed<k>/`. Nothing is guessed for one that failed:
statistics take the finished ones, and the report tells of the others.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from mlm_jax import config, metrics, workdir
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.flops import step_flops

DIVERGED = "diverged.json"  # in a run's directory, says why it had to stop
OWN_RATE_SHARE = 0.1  # of the training, at its end, that the loss at its own rate is of


class Curves(NamedTuple):
    """Evaluations in order of their steps. `seconds` are wall-clock, the rest is not.

    `tokens` are those that the encoder has read, special ones not counted; each view of
    a row counts.
    """

    steps: np.ndarray  # int[K], as all below
    tokens: np.ndarray
    predictions: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray
    values: dict[str, np.ndarray]  # of "eval/loss@0.15", …


class Run(NamedTuple):
    arm: str
    seed: int
    state: str  # finished, unfinished, diverged, missing
    reason: str  # what is known of a run that is not finished
    config: dict[str, Any]  # {"section.field": value}; {} if missing, as all below
    environment: dict[str, Any]
    curves: Curves | None
    own_rate_loss: float  # over the last OWN_RATE_SHARE of the training
    tokens_per_second: float  # wall-clock


def read(experiment, directory):
    """Returns the Run of every arm and seed, in the experiment's order.

    Raises InputError for files that are damaged, or belong to another experiment.
    """
    directory = pathlib.Path(directory)
    return [
        read_run(directory / arm.name / f"seed{seed}", experiment, arm, seed)
        for arm in experiment.arms
        for seed in experiment.seeds
    ]


def read_run(folder, experiment, arm, seed):
    """Returns the Run in a folder."""
    diverged = _read_diverged(folder)
    if not (folder / "metrics.jsonl").exists():
        state = "diverged" if diverged else "missing"
        reason = diverged or "no metrics.jsonl"
        return Run(arm.name, seed, state, reason, {}, {}, None, math.nan, math.nan)
    c = config.flatten(config.load(folder))
    _check_settings(folder, c, experiment.base | arm.settings)
    lines = metrics.read_json_lines(folder / "metrics.jsonl")
    curves = _read_curves(folder, c, lines)
    last = int(curves.steps[-1]) if len(curves.steps) else 0
    state, reason = "finished", ""
    if diverged:
        state, reason = "diverged", diverged
    elif last < c["optim.num_steps"]:
        state = "unfinished"
        reason = f"at step {last:,} of {c['optim.num_steps']:,}"
        if len(values_K := curves.values.get(experiment.metric, ())):
            reason += f", {experiment.metric} {values_K[-1]:.4f}"
    elif any(math.isnan(values_K[-1]) for values_K in curves.values.values()):
        state, reason = "diverged", "its last evaluation is not finite"
    speeds = _column(lines, "train/tokens_per_second")[1]
    return Run(
        arm=arm.name,
        seed=seed,
        state=state,
        reason=reason,
        config=c,
        environment=workdir.read_environment(folder),
        curves=curves,
        own_rate_loss=_own_rate_loss(lines, c["optim.num_steps"]),
        tokens_per_second=float(np.median(speeds)) if len(speeds) else math.nan,
    )


def _read_diverged(folder):
    path = folder / DIVERGED
    if not path.exists():
        return ""
    try:
        return str(json.loads(path.read_bytes())["reason"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error!r}); remove it.") from error


def _check_settings(folder, c, expected):
    for name, value in expected.items():
        if c.get(name) != value:
            raise InputError(
                f"{folder}/config.json has {name} = {c.get(name)!r}; the experiment "
                f"says {value!r}. The directory holds another experiment's run."
            )


def _read_curves(folder, c, lines):
    evals = [line for line in lines if any(n.startswith("eval/") for n in line)]
    names = sorted({name for line in evals for name in line if "eval/" in name})
    steps_K = np.array([line["step"] for line in evals], int)
    tokens_T, predictions_T = _read_ledger(folder, max(steps_K, default=0))
    seconds_T = _seconds(lines, tokens_T)
    flops_T = _flops(folder, c, predictions_T)
    return Curves(
        steps=steps_K,
        tokens=tokens_T[steps_K],
        predictions=predictions_T[steps_K],
        flops=flops_T[steps_K],
        seconds=seconds_T[steps_K],
        values={
            name: np.array([_number(line.get(name)) for line in evals])
            for name in names
        },
    )


def _read_ledger(folder, last):
    """Returns tokens int[T + 1] and predictions int[T + 1] up to each step."""
    path = folder / "ledger.jsonl"
    lines = {line["step"]: line for line in metrics.read_json_lines(path)}
    missing = set(range(1, last + 1)) - lines.keys()
    if missing:
        raise InputError(f"{path} lacks step {min(missing)}.")
    counts = (
        [0] + [lines[step][name] for step in range(1, last + 1)]
        for name in ("num_maskable", "num_masked")
    )
    return tuple(np.cumsum(counts_T) for counts_T in counts)


def _seconds(lines, tokens_T):
    """Returns the seconds up to each step, from the tokens a second that were logged:
    without evaluation, saving and compilation."""
    steps, speeds = _column(lines, "train/tokens_per_second")
    if not len(steps):
        return np.full(len(tokens_T), math.nan)
    speed_T = np.interp(np.arange(1, len(tokens_T)), steps, speeds)
    return np.concatenate([[0.0], np.cumsum(np.diff(tokens_T) / speed_T)])


def _flops(folder, c, predictions_T):
    sizes = {
        "width": c["model.width"],
        "mlp_width": c["model.mlp_width"],
        "row_length": c["data.row_length"],
        "vocab_size": _vocab_size(folder / "tokenizer.json"),
        "gated": c["model.gated"],
        "global_every": c["model.global_every"],
        "window": c["model.window"],
    }
    encoder = step_flops(
        **sizes,
        num_layers=c["model.num_layers"],
        num_rows=c["data.batch_size"] * c["corruption.views"],
        predictions_per_row=0,
    )
    head = step_flops(**sizes, num_layers=0, num_rows=1, predictions_per_row=1)
    return encoder * np.arange(len(predictions_T)) + head * predictions_T


def _vocab_size(path):
    return Tokenizer.load(path).vocab_size


def _own_rate_loss(lines, num_steps):
    """Returns the mean over the predictions of the logged steps at the end."""
    first = num_steps * (1 - OWN_RATE_SHARE)
    found = [
        (line["train/loss"], line["train/num_masked"])
        for line in lines
        if line["step"] > first and line.get("train/loss") is not None
    ]
    total = sum(loss * count for loss, count in found)
    return metrics.mean(total, sum(count for _, count in found))


def _column(lines, name):
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, int), np.array(values, float)


def _number(value):
    return math.nan if value is None else value
