"""The whole pipeline on real text, as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import tiny
from mlm_jax import checkpoint, metrics, training

ROOT = pathlib.Path(__file__).parents[1]
# Says so, should anything on the path import a TensorFlow that happens to be there.
WATCH_TENSORFLOW = """\
import runpy, sys
sys.argv = ["train", *sys.argv[1:]]
try:
    runpy.run_module("mlm_jax.train", run_name="__main__")
finally:
    if "tensorflow" in sys.modules:
        raise SystemExit("TensorFlow was imported")
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, *code, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """`configs/tiny.py` to its end."""
    workdir = tmp_path_factory.mktemp("tiny") / "run"
    result = run(
        ["-c", WATCH_TENSORFLOW],
        "--config=configs/tiny.py",
        f"--workdir={workdir}",
        f"--config.data.cache_dir={workdir.parent / 'cache'}",
    )
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout


def lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_held_out_loss_falls_well_below_the_unigram_entropy(tiny_run):
    workdir, output = tiny_run
    losses = [
        line["eval/loss@0.15"] for line in lines(workdir) if "eval/loss@0.15" in line
    ]
    entropy = float(output.split("unigram entropy ")[1].split()[0])
    assert losses[0] == pytest.approx(np.log(2048), rel=0.02)
    assert losses[-1] < entropy - 0.7
    assert losses[-1] == min(losses)


def test_progress_and_answers_are_printed(tiny_run):
    _, output = tiny_run
    assert "tokens/s" in output and " left" in output and "accuracy" in output
    assert "held-out at step 0, rate 0.15" in output
    assert "Mr. Darcy [MASK] to Elizabeth.\n  [MASK]: " in output


def test_the_contract_of_a_workdir(tiny_run):
    workdir, _ = tiny_run
    present = {path.name for path in workdir.iterdir()}
    assert {"config.json", "metrics.jsonl", "tokenizer.json", "checkpoints"} <= present
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    named = set().union(*lines(workdir))
    for name in ("loss", "accuracy", "num_masked", "mask_rate", "mask_hash"):
        assert f"train/{name}" in named
    for name in ("learning_rate", "grad_norm", "tokens_per_second"):
        assert f"train/{name}" in named
    for name in ("loss", "accuracy", "mask_hash"):
        assert f"eval/{name}@0.15" in named


def test_the_exam_has_the_same_masks_at_every_step(tiny_run):
    workdir, _ = tiny_run
    hashes = {line.get("eval/mask_hash@0.15") for line in lines(workdir)} - {None}
    assert len(hashes) == 1


def test_the_commands_read_the_run(tiny_run):
    workdir, output = tiny_run
    text = "Mr. Darcy [MASK] to Elizabeth."
    filled = run(["-m", "mlm_jax.fill_mask"], f"--workdir={workdir}", text)
    assert filled.returncode == 0, filled.stderr
    assert filled.stdout.split("\n", 1)[1] in output  # the same as training printed
    checked = run(["-m", "mlm_jax.check"], f"--workdir={workdir}")
    steps = tiny.get_config().optim.num_steps
    assert checked.stdout.startswith(f"step {steps} digest sha256:")
    step, state = checkpoint.restore_latest(workdir)
    assert step == steps == state["step"]


class FakeWriter:
    def __init__(self):
        self.steps, self.ledger_steps = [], []

    def write(self, step, scalars):
        self.steps.append(step)

    def write_ledger(self, step, sums):
        assert sums.keys() >= set(metrics.LEDGER)
        self.ledger_steps.append(step)


def step_metrics(**changes):
    names = ["loss", "num_correct", "num_maskable", "num_mask_tokens", "num_tokens"]
    names += ["num_random_tokens", "num_kept_tokens", "num_overflow", "mask_hash"]
    names += ["learning_rate", "grad_norm", "num_masked", "num_hidden", "weight"]
    values = dict.fromkeys(names, 1) | {"unit_lengths": [1, 0]} | changes
    return {name: jax.numpy.float32(value) for name, value in values.items()}


def test_metrics_are_logged_one_step_late_and_all_of_them():
    writer = FakeWriter()
    c = tiny.get_config()
    c.log.every_steps, c.optim.num_steps = 2, 5
    log = training.TrainLog(writer, metrics.Progress(5), c)
    for step in range(1, 6):
        log.add(step, step_metrics, np.arange(2))
        assert writer.steps == [s for s in range(1, step) if s % 2 == 0]
    log.flush()
    assert writer.steps == [2, 4, 5]
    assert writer.ledger_steps == [1, 2, 3, 4, 5]  # the ledger leaves none out


def test_b34_a_step_without_targets_has_no_loss():
    scalars = metrics.train_scalars(
        jax.device_get(step_metrics(num_masked=0, weight=0, loss=0, num_correct=0))
    )
    assert scalars["train/num_masked"] == 0
    assert "train/loss" not in scalars and "train/accuracy" not in scalars


def test_sums_become_means():
    scalars = metrics.train_scalars(
        jax.device_get(
            step_metrics(
                num_hidden=8,
                unit_lengths=[2, 3],
                num_masked=4,
                num_maskable=32,
                num_random_tokens=2,
                weight=20,
                loss=50,
                num_correct=5,
            )
        )
    )
    # The loss by the weight of the predictions, whatever their number.
    assert scalars["train/num_masked"] == 4
    assert scalars["train/loss"] == 2.5
    assert scalars["train/accuracy"] == 0.25
    assert scalars["train/mask_rate"] == 0.25
    assert scalars["train/random_token_share"] == 0.25
    assert scalars["train/unit_length"] == 8 / 5
