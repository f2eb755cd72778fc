"""Runs that were never trained, written as real ones are."""

import functools
import json
import math
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np

from configs import tiny
from mlm_jax import config, metrics, workdir
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.experiment.sweep import Arm, Experiment

EVAL_RATES = (0.15, 0.4)
NUM_STEPS, EVERY = 40, 10
ENTROPY = 6.0


class Store(NamedTuple):
    tokenizer: Tokenizer
    fingerprint: str


@functools.cache
def store():
    documents = ["the quick brown fox jumps over the lazy dog"] * 3
    return Store(
        Tokenizer.train(
            documents,
            kind="wordpiece",
            vocab_size=64,
            lowercase=True,
            strip_accents=True,
        ),
        "0123456789abcdef",
    )


@functools.cache
def record():
    """Returns the files of a run that do not differ from run to run."""
    with tempfile.TemporaryDirectory() as folder:
        workdir.record(pathlib.Path(folder), store(), 0, "1 cpu", {})
        return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def experiment(settings, seeds, baseline, **fields):
    """Returns one with an arm for each of `settings`, named by their values."""
    arms = [Arm(arm_name(s), s) for s in settings]
    return Experiment(
        **{
            "name": "made_up",
            "question": "Does it?",
            "config": "configs/tiny.py",
            "arms": tuple(arms),
            "seeds": tuple(seeds),
            "baseline": arm_name(baseline),
            "metric": "eval/loss@0.15",
            "base": {"optim.num_steps": NUM_STEPS, "eval.rates": EVAL_RATES},
        }
        | fields
    )


def arm_name(settings):
    return ",".join(f"{name.rsplit('.')[-1]}={v}" for name, v in settings.items())


def rates(*values):
    return [{"corruption.rate": value} for value in values]


def loss_at(c, seed, step, rate, best=0.3):
    """Returns a loss that falls with steps and is least for training at `best`; seeds
    differ, the same at all arms but for a little."""
    logit = math.log(c.corruption.rate / (1 - c.corruption.rate))
    away = logit - math.log(best / (1 - best))
    rng = np.random.default_rng([seed, int(1000 * c.corruption.rate), step])
    noise = np.random.default_rng(seed).normal(0, 0.05) + rng.normal(0, 0.01)
    least = 4 + 0.8 * rate + 0.06 * away**2
    return least + (ENTROPY + 1.5 - least) * math.exp(-step / 12) + noise * (step > 0)


def write(directory, experiment, *, losses=loss_at, states=(), speed=20_000.0):
    """Writes all runs. `states` maps (arm, seed) to missing, unfinished or diverged."""
    states = dict(states)
    for arm in experiment.arms:
        for seed in experiment.seeds:
            state = states.get((arm.name, seed), "finished")
            if state != "missing":
                folder = directory / arm.name / f"seed{seed}"
                write_run(folder, experiment, arm, seed, losses, state, speed)


def write_run(folder, experiment, arm, seed, losses, state, speed):
    c = tiny.get_config()
    settings = experiment.base | arm.settings | {"seed": seed}
    c.update_from_flattened_dict(settings)
    folder.mkdir(parents=True)
    for name, content in record().items():
        (folder / name).write_bytes(content)
    config.save(c, folder)
    last = NUM_STEPS if state == "finished" else NUM_STEPS // 2
    rng = np.random.default_rng(seed)
    with metrics.Writer(folder, None) as writer:
        for step in range(last + 1):
            if step:
                num_masked = write_step(writer, c, step, rng)
                scalars = {
                    "train/loss": losses(c, seed, step, c.corruption.rate),
                    "train/num_masked": num_masked,
                    "train/tokens_per_second": speed * rng.uniform(0.9, 1.1),
                }
                if step % 5 == 0:
                    writer.write(step, scalars)
            if step % EVERY == 0:
                writer.write(step, exam(c, seed, step, losses))
    if state == "diverged":
        text = json.dumps({"reason": f"step {last + 1}: loss nan"})
        (folder / "diverged.json").write_text(text)


def write_step(writer, c, step, rng):
    """Returns how many were predicted."""
    num_maskable = 126 * c.data.batch_size
    num_masked = int(rng.binomial(num_maskable, c.corruption.rate))
    sums = dict.fromkeys(metrics.LEDGER, 0)
    counts = {"num_maskable": num_maskable, "num_masked": num_masked}
    writer.write_ledger(step, sums | counts | {"unit_lengths": [num_masked]})
    return num_masked


def exam(c, seed, step, losses):
    scalars = {}
    for rate in c.eval.rates:
        loss = losses(c, seed, step, rate)
        scalars |= {
            f"eval/loss@{rate:g}": loss,
            f"eval/accuracy@{rate:g}": math.exp(-loss),
            f"eval/mask_hash@{rate:g}": 7,
        }
    return scalars
