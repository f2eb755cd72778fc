"""Starts the training command as users do, on a model and text that take seconds."""

import json
import os
import pathlib
import subprocess
import sys
import time

from mlm_jax import checkpoint

ROOT = pathlib.Path(__file__).parents[1]
TEXT = ROOT / "mlm_jax" / "data" / "austen" / "northangerabbey.txt"
OVERRIDES = {
    "data.source": f"files:{TEXT}",
    "data.document": "blank_line",
    "data.row_length": 32,
    "data.batch_size": 8,
    "tokenizer.vocab_size": 512,
    "model.num_layers": 2,
    "model.width": 16,
    "model.mlp_width": 32,
    "model.dropout": 0.1,
    "optim.num_steps": 8,
    "optim.warmup_steps": 2,
    "eval.num_rows": 16,
    "eval.every_steps": 4,
    "checkpoint.every_steps": 4,
    "log.every_steps": 1,
}


# The command after something else in the same process.
AFTER = """
import runpy, sys
sys.argv[0] = "train"
runpy.run_module("mlm_jax.train", run_name="__main__", alter_sys=True)
"""


def start(
    workdir, shared, *flags, before="", through=(), env=None, cwd=ROOT, **overrides
):
    """Returns the process; `shared` is where runs keep rows and compiled programs.

    `before` is code that the process runs first, `through` a command that starts it.
    """
    overrides = OVERRIDES | {"data.cache_dir": shared / "rows"} | overrides
    what = ["-c", before + AFTER] if before else ["-m", "mlm_jax.train"]
    return subprocess.Popen(
        [*through, sys.executable, *what, f"--config={ROOT}/configs/tiny.py"]
        + [f"--workdir={workdir}", *flags]
        + [f"--config.{name}={value}" for name, value in overrides.items()],
        cwd=cwd,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "",  # the real program, not the quickly compiled one of tests
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    """Returns all that the process has printed, after it has ended with `code`."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out + err


def train(workdir, shared, *flags, code=0, **settings):
    return finish(start(workdir, shared, *flags, **settings), code)


def digest(workdir):
    """What `check` prints of the newest checkpoint."""
    step, state = checkpoint.restore_latest(workdir)
    compared = {name: state[name] for name in checkpoint.COMPARED}
    return f"step {step} digest sha256:{checkpoint.digest(compared)}"


def lines(workdir):
    """The lines of metrics.jsonl, without what depends on the clock."""
    text = (workdir / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row.pop("train/tokens_per_second", None)
        row.pop("train/input_wait", None)
    return rows


def assert_same(workdir, other):
    """Bit for bit the same state, and the same lines of both logs."""
    assert digest(workdir) == digest(other)
    assert lines(workdir) == lines(other)
    logs = [(path / "ledger.jsonl").read_bytes() for path in (workdir, other)]
    assert logs[0] == logs[1]


def wait_for(condition, process, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.002)


def contents(folder):
    """Returns time and bytes of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
