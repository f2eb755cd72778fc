"""Several processes train one run: the numbers of one process, written once, and none
goes on alone."""

import contextlib
import os
import random
import signal
import socket
import time

import numpy as np
import pytest

from configs import tiny
from mlm_jax import checkpoint, processes
from mlm_jax.errors import InputError
from tests import runs

SLOW = pytest.mark.slow
MODE = {"parallel.mode": "shard_map"}


def start_pair(workdir, shared, *flags, each=({}, {}), **overrides):
    """Starts two processes; `each` has what is of one of them only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags += (f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
    return [
        runs.start(
            workdir, shared, *flags, f"--process_id={i}", **MODE | overrides | each[i]
        )
        for i in range(2)
    ]


def finish_pair(pair, code=0):
    with ended(pair):
        return [runs.finish(process, code) for process in pair]


@contextlib.contextmanager
def ended(pair):
    """JAX's runtime takes SIGTERM, so whatever is left is killed."""
    try:
        yield
    finally:
        for process in pair:
            process.kill()
            process.communicate()


def train_alone(workdir, shared, monkeypatch, *flags, **overrides):
    """One process with as many devices as the pair has."""
    with monkeypatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "2")
        return runs.train(workdir, shared, *flags, **MODE | overrides)


def assert_same_lines(workdir, other):
    ledgers = [(path / "ledger.jsonl").read_text() for path in (workdir, other)]
    assert ledgers[0] == ledgers[1]
    for line, expected in zip(runs.lines(workdir), runs.lines(other), strict=True):
        assert line.keys() == expected.keys()
        for name, value in line.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


@SLOW
def test_two_processes_give_the_numbers_of_one(tmp_path, shared, monkeypatch):
    """However many micro-batches they have; and tell and write them once."""
    one, two = tmp_path / "one", tmp_path / "two"
    train_alone(one, shared, monkeypatch)
    first, second = finish_pair(start_pair(two, shared))
    assert_same_lines(two, one)
    assert "held-out at step 8" in first
    assert "held-out" not in second
    saved = [sorted(os.listdir(workdir / "checkpoints")) for workdir in (one, two)]
    assert saved[0] == saved[1]
    finish_pair(start_pair(tmp_path / "four", shared, **{"parallel.microbatches": 4}))
    assert_same_lines(tmp_path / "four", one)


@SLOW
@pytest.mark.parametrize("layout", [{}, {"mode": "jit", "mesh.fsdp": 2}])
def test_a_run_goes_on_with_another_number_of_processes(
    layout, tmp_path, shared, monkeypatch
):
    """Two, then one, then two; parameters whole on each device, or in two parts."""
    fields = {f"parallel.{name}": value for name, value in layout.items()}
    fields |= {"optim.schedule": "constant", "optim.num_steps": 4}
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    train_alone(whole, shared, monkeypatch, **fields | {"optim.num_steps": 12})
    finish_pair(start_pair(workdir, shared, **fields))
    train_alone(workdir, shared, monkeypatch, "--extend_to=8", **fields)
    finish_pair(start_pair(workdir, shared, "--extend_to=12", **fields))
    assert_same_lines(workdir, whole)


@SLOW
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_stops_all_at_the_same_step(signalled, tmp_path, shared):
    """After saving it, with exit code 75; and the run that goes on is the whole run."""
    more = {"optim.num_steps": 400, "checkpoint.every_steps": 100}
    pair = start_pair(tmp_path / "run", shared, **more)
    with ended(pair):
        wait_for_step(tmp_path / "run", 5, pair)
        pair[signalled].send_signal(signal.SIGTERM)
        outputs = [runs.finish(process, 75) for process in pair]
    (step,) = os.listdir(tmp_path / "run" / "checkpoints")
    assert all(f"after saving step {step}" in output for output in outputs)
    finish_pair(start_pair(tmp_path / "run", shared, **more))
    finish_pair(start_pair(tmp_path / "whole", shared, **more))
    assert runs.digest(tmp_path / "run") == runs.digest(tmp_path / "whole")


def count_lines(path):
    return path.read_text().count("\n") if path.exists() else 0


@SLOW
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_one_is_lost_the_other_ends(how, lost, tmp_path, shared):
    pair = start_pair(tmp_path / "run", shared, **{"optim.num_steps": 100000})
    with ended(pair):
        wait_for_step(tmp_path / "run", 5, pair)
        pair[lost].send_signal(how)
        assert seconds_to_end(pair[1 - lost]) < processes.END_SECONDS
        assert pair[1 - lost].returncode not in (0, 75)


def seconds_to_end(process):
    begin = time.monotonic()
    process.communicate(timeout=5 * processes.END_SECONDS)
    return time.monotonic() - begin


@SLOW
def test_r29_twenty_random_kills_and_the_run_ends_as_if_there_were_none(
    tmp_path, shared
):
    """No half checkpoint is ever taken up, wherever the kill falls."""
    more = {"optim.num_steps": 1300, "checkpoint.every_steps": 20}
    workdir, rng = tmp_path / "run", random.Random(0)
    slowest = 0.0
    for kill in range(20):
        saved = newest_step(workdir)
        pair = start_pair(workdir, shared, **more)
        with ended(pair):
            if kill % 4 == 0:  # at any moment of the start
                time.sleep(rng.uniform(0, 8))
            else:
                wait_for_step(workdir, saved + rng.randrange(1, 60), pair)
            lost = rng.randrange(2)
            pair[lost].kill()
            slowest = max(slowest, seconds_to_end(pair[1 - lost]))
            assert pair[1 - lost].returncode not in (0, 75)
    print(f"the other ended within {slowest:.1f} s of each kill")
    assert slowest < processes.END_SECONDS
    finish_pair(start_pair(workdir, shared, **more))
    finish_pair(start_pair(tmp_path / "whole", shared, **more))
    assert runs.digest(workdir) == runs.digest(tmp_path / "whole")
    steps = [line["step"] for line in runs.lines(workdir) if "train/loss" in line]
    assert steps == list(range(1, 1301))


def newest_step(workdir):
    return next(iter(checkpoint.steps(workdir / "checkpoints")), 0)


def wait_for_step(workdir, step, pair):
    """Of this start, which first cuts the ledger to what is saved."""
    ledger, begin = workdir / "ledger.jsonl", time.time()

    def has_come():
        is_new = ledger.exists() and ledger.stat().st_mtime > begin
        return is_new and count_lines(ledger) >= step

    runs.wait_for(has_come, pair[0])


@SLOW
def test_b90_another_number_of_rows_is_refused_before_the_first_step(tmp_path, shared):
    """The same command, but the file has 13 lines on one machine and 12 on the other:
    they would count epochs, and end, at different steps."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder, count in zip(folders, (13, 12), strict=True):
        folder.mkdir()
        lines = [f"line {i} of the text on this machine\n" for i in range(count)]
        (folder / "text.txt").write_text("".join(lines))
    fields = {"data.source": "files:text.txt", "data.document": "line"}
    fields |= {"data.batch_size": 4, "data.packing": "single"}
    each = [{"cwd": folder} for folder in folders]
    begin = time.monotonic()
    pair = start_pair(tmp_path / "run", shared, each=each, **fields)
    outputs = finish_pair(pair, code=2)
    assert time.monotonic() - begin < 120
    for output in outputs:
        assert "error: data.fingerprint differs between processes" in output
    assert not (tmp_path / "run" / "config.json").exists()


@SLOW
def test_another_config_is_refused_before_the_first_step(tmp_path, shared):
    each = {"optim.num_steps": 8}, {"optim.num_steps": 9}
    for output in finish_pair(start_pair(tmp_path / "run", shared, each=each), code=2):
        assert "error: config differs between processes" in output
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "number, message",
    [(None, "--process_id must be given too"), (2, "--process_id=2; expected 0 to 1")],
)
def test_flags_that_do_not_go_together(number, message):
    with pytest.raises(InputError, match=message):
        processes.join("localhost:1", 2, number)


def test_what_several_processes_cannot_run(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    c, sizes = tiny.get_config(), {"data": 8, "fsdp": 1, "tensor": 1}
    with pytest.raises(InputError, match="pmap is for one process, and there are 2"):
        processes.check(c, sizes)
    c.parallel.mode = "shard_map"
    processes.check(c, sizes)
    with pytest.raises(InputError, match="has 4 device.* must use all 8"):
        processes.check(c, sizes | {"data": 4})
    with pytest.raises(InputError, match="tensor = 16 must divide the 8 device"):
        processes.check(c, sizes | {"tensor": 16})
