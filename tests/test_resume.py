"""A run that is killed and started again ends as if it had never been killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mlm_jax import checkpoint, metrics

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


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Where all runs of this file keep rows and compiled programs."""
    return tmp_path_factory.mktemp("shared")


def start(workdir, shared, **overrides):
    overrides = OVERRIDES | {"data.cache_dir": shared / "rows"} | overrides
    return subprocess.Popen(
        [sys.executable, "-m", "mlm_jax.train", "--config=configs/tiny.py"]
        + [f"--workdir={workdir}"]
        + [f"--config.{name}={value}" for name, value in overrides.items()],
        cwd=ROOT,
        env=os.environ
        | {
            "XLA_FLAGS": "",  # the real program, not the quickly compiled one of tests
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out + err


def train(workdir, shared, code=0, **overrides):
    return finish(start(workdir, shared, **overrides), code)


def digest(workdir):
    """Returns (step, a hash of every bit of the newest checkpoint)."""
    step, state = checkpoint.restore_latest(workdir)
    return step, checkpoint.digest(state)


def lines(workdir, name="metrics.jsonl"):
    """The lines of a log, without what depends on the clock."""
    text = (workdir / name).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row.pop("train/tokens_per_second", None)
    return rows


def assert_same_run(workdir, whole):
    """The parameters and all else that is saved, the metrics, and the masks."""
    assert digest(workdir) == digest(whole)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert lines(workdir, name) == lines(whole, name)
    assert len(lines(whole, "ledger.jsonl")) == OVERRIDES["optim.num_steps"]


def wait_for(condition, process, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shared):
    """Eight steps without an interruption."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train(workdir, shared)
    return workdir


def test_b56_killed_after_four_steps_ends_bit_identical(whole, tmp_path, shared):
    workdir = tmp_path / "run"
    process = start(workdir, shared)
    wait_for((workdir / "checkpoints" / "4").is_dir, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (workdir / "checkpoints" / "8").exists()

    assert "resumes at step 4" in train(workdir, shared)
    assert_same_run(workdir, whole)


@pytest.mark.slow
def test_killed_at_many_moments_ends_bit_identical(whole, tmp_path, shared):
    """Kills spread over start-up, compilation, steps and saves."""
    workdir = tmp_path / "run"
    for tenths in range(10, 200, 7):
        process = start(workdir, shared, **{"checkpoint.every_steps": 1})
        try:
            process.communicate(timeout=tenths / 10)
            assert process.returncode == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    train(workdir, shared, **{"checkpoint.every_steps": 1})
    assert_same_run(workdir, whole)


def test_sigterm_saves_exits_75_and_resumes_exactly(whole, tmp_path, shared):
    workdir = tmp_path / "run"
    process = start(workdir, shared)
    logged = workdir / "metrics.jsonl"
    wait_for(lambda: logged.exists() and '"step": 1,' in logged.read_text(), process)
    process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM after saving step" in finish(process, code=75)
    train(workdir, shared)
    assert_same_run(workdir, whole)


def test_a_finished_run_does_nothing_again(whole, shared):
    def state():
        files = [path for path in whole.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert "is finished: step 8 of 8" in train(whole, shared)
    assert state() == before


def test_b67_the_last_step_is_saved_off_the_interval(tmp_path, shared):
    overrides = {
        "optim.num_steps": 5,
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 3,
    }
    train(tmp_path / "run", shared, **overrides)
    steps = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == [2, 4, 5]


def test_another_config_is_refused_by_field(whole, shared):
    output = train(whole, shared, code=2, **{"corruption.rate": 0.4})
    assert "corruption.rate: 0.3 -> 0.4" in output


def test_each_step_is_logged_once(whole):
    keys = [(line["step"], "eval/loss@0.15" in line) for line in lines(whole)]
    trained = [step for step, is_eval in keys if not is_eval]
    assert trained == list(range(1, 9))
    assert [step for step, is_eval in keys if is_eval] == [0, 4, 8]
    for line in lines(whole):
        assert line["step"] in (0, 4, 8) or line["train/mask_rate"] == pytest.approx(
            0.3, abs=0.03
        )


def test_what_a_killed_writer_left_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a"')
    with metrics.Writer(tmp_path, start_step=1) as writer:
        writer.write(2, {"a": float("inf")})
    assert path.read_text() == '{"step": 1, "a": 1}\n{"step": 2, "a": null}\n'


def test_a_run_killed_before_its_first_checkpoint_leaves_no_line(tmp_path):
    """It evaluates at step 0 again."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/loss@0.15": 7}\n')
    with metrics.Writer(tmp_path, start_step=None) as writer:
        writer.write(0, {"eval/loss@0.15": 6.0})
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines == '{"step": 0, "eval/loss@0.15": 6.0}\n'
