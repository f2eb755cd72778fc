"""Several processes train one run: the numbers of one process, written once."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from configs import tiny
from mlm_jax import processes
from mlm_jax.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 6
SETTINGS = (
    "--config=configs/tiny.py",
    f"--config.optim.num_steps={STEPS}",
    "--config.parallel.mode=shard_map",
    "--config.data.row_length=32",
    "--config.model.width=32",
    "--config.model.mlp_width=64",
    "--config.eval.every_steps=6",
    "--config.eval.num_rows=16",
    "--config.eval.batch_size=16",
    "--config.checkpoint.every_steps=3",
    "--config.log.every_steps=1",
    "--config.optim.warmup_steps=1",
)


def start(workdir, cache, *flags, devices=1):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
        " --xla_backend_optimization_level=0",
    }
    common = (f"--workdir={workdir}", f"--config.data.cache_dir={cache}")
    return subprocess.Popen(
        [sys.executable, "-m", "mlm_jax.train", *SETTINGS, *common, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_pair(workdir, cache, *flags):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
    return [start(workdir, cache, *pair, f"--process_id={i}", *flags) for i in range(2)]


def finish(runs, timeout=600):
    """Returns the exit codes and the output."""
    try:
        outputs = [run.communicate(timeout=timeout)[0] for run in runs]
    finally:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                run.kill()
    return [run.returncode for run in runs], outputs


def lines(workdir, name):
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process with two devices, and two processes with one each."""
    folder = tmp_path_factory.mktemp("processes")
    codes, outputs = finish([start(folder / "one", folder / "cache", devices=2)])
    assert codes == [0], outputs
    codes, outputs = finish(start_pair(folder / "two", folder / "cache"))
    assert codes == [0, 0], outputs
    return folder, outputs


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(runs):
    folder, (first, second) = runs
    assert lines(folder / "two", "ledger.jsonl") == lines(
        folder / "one", "ledger.jsonl"
    )
    one, two = (lines(folder / name, "metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for expected, line in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm", "eval/loss@0.15"):
            if name in expected:
                np.testing.assert_allclose(line[name], expected[name], rtol=1e-5)
    # Written and told once.
    assert "held-out at step 6" in first
    assert "held-out" not in second
    names = sorted(path.name for path in (folder / "two" / "checkpoints").iterdir())
    assert names == sorted(p.name for p in (folder / "one" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(runs):
    folder, _ = runs
    more = "--extend_to=9"
    codes, outputs = finish([start(folder / "two", folder / "cache", more, devices=2)])
    assert codes == [0], outputs
    codes, outputs = finish(start_pair(folder / "one", folder / "cache", more))
    assert codes == [0, 0], outputs
    one, two = (lines(folder / name, "metrics.jsonl")[-1] for name in ("one", "two"))
    assert one["step"] == two["step"] == 9
    loss = "eval/loss@0.15"
    np.testing.assert_allclose(one[loss], two[loss], rtol=1e-5)


@pytest.mark.slow
def test_when_one_is_killed_the_other_ends(tmp_path, runs):
    """Within the documented time, non-zero, and what is left can be resumed."""
    cache = runs[0] / "cache"
    pair = start_pair(tmp_path / "run", cache, "--config.optim.num_steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") > 4):
        assert time.monotonic() < deadline
        assert all(run.poll() is None for run in pair)
        time.sleep(0.2)
    pair[1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    pair[0].communicate(timeout=2 * processes.HEARTBEAT_SECONDS)
    assert pair[0].returncode != 0
    assert time.monotonic() - begin < processes.HEARTBEAT_SECONDS + 10


def test_flags_that_do_not_go_together(monkeypatch):
    class Flag:
        def __init__(self, value):
            self.value = value

    monkeypatch.setattr(processes, "COORDINATOR", Flag("localhost:1"))
    monkeypatch.setattr(processes, "NUM_PROCESSES", Flag(2))
    monkeypatch.setattr(processes, "PROCESS_ID", Flag(None))
    monkeypatch.setattr(processes, "DISTRIBUTED", Flag(False))
    with pytest.raises(InputError, match="--process_id must be given too"):
        processes.start()
    monkeypatch.setattr(processes, "PROCESS_ID", Flag(2))
    with pytest.raises(InputError, match="--process_id=2; expected 0 to 1"):
        processes.start()


def test_pmap_is_for_one_process(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="pmap is for one process, and there are 2"):
        processes.check(tiny.get_config())
