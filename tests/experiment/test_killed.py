"""An experiment that is killed ends in the report of one that is not."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from tests import runs

FILE = '''"""What share should be hidden?"""

from mlm_jax.experiment.sweep import values

CONFIG = "configs/tiny.py"
ARMS = values("corruption.rate", 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
SEEDS = range(6)
BASELINE = "rate=0.15"
METRIC = "eval/loss@0.15"
SETTINGS = {settings}
'''
KILLS = 3


def start(module, file, workdir, shared):
    return subprocess.Popen(
        [sys.executable, "-m", f"mlm_jax.{module}", str(file), f"--workdir={workdir}"],
        cwd=runs.ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(runs.ROOT),
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err


def pictures_and_words(workdir):
    """What the report says, without the clock's part."""
    facts = json.loads((workdir / "report" / "report.json").read_text())
    del facts["wall_clock"]
    pictures = {
        path.name: path.read_bytes()
        for path in (workdir / "report").glob("*.svg")
        if "seconds" not in path.name
    }
    return facts, pictures


@pytest.mark.slow
def test_nine_rates_and_six_seeds_killed_three_times(tmp_path, shared):
    settings = runs.OVERRIDES | {
        "data.cache_dir": str(shared / "rows"),
        "eval.rates": (0.15, 0.4),
    }
    file = tmp_path / "rates.py"
    file.write_text(FILE.format(settings=repr(settings)))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start("sweep", file, whole, shared))
    draw = random.Random(0)
    num_killed = 0
    while num_killed < KILLS:
        process = start("sweep", file, killed, shared)
        try:
            process.wait(draw.uniform(4, 9))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            num_killed += 1
        else:
            break  # it was done before its next kill
    finish(start("sweep", file, killed, shared))
    assert num_killed == KILLS
    for workdir in (whole, killed):
        finish(start("report", file, workdir, shared))
    assert pictures_and_words(whole) == pictures_and_words(killed)
    assert len(list(killed.glob("*/seed*/config.json"))) == 54
