"""What may happen to a run of the real command, and what it then says and does.

Kills are in test_resume.py and test_checkpoint.py, damage of other files in
test_hostile.py.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from mlm_jax import checkpoint, manifest, metrics, workdir
from tests.runs import (
    assert_same,
    contents,
    digest,
    finish,
    lines,
    start,
    train,
    wait_for,
)


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def flip_a_bit(step, seed=0):
    """Flips a bit of the file with the arrays."""
    path = max(step.rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1
    path.write_bytes(content)
    return path


def test_r08_r10_damage_is_named_and_costs_the_steps_since(copy, whole, shared):
    folder = copy / "checkpoints"
    newest = flip_a_bit(folder / "8")
    intact = (folder / "4" / manifest.NAME).read_bytes()
    (folder / "4" / manifest.NAME).unlink()
    before = contents(copy)
    output = train(copy, shared, code=4)
    assert f"step 8: {newest.relative_to(folder / '8')} has changed" in output
    assert "step 4: manifest.json" in output
    assert output.splitlines()[-1].startswith("error: no checkpoint in ")
    assert contents(copy) == before

    (folder / "4" / manifest.NAME).write_bytes(intact)
    output = train(copy, shared)
    assert "warning: checkpoint is damaged and not used, step 8: state/" in output
    assert "resumes at step 4" in output
    assert_same(copy, whole)


def test_r28_a_second_process_is_refused_by_name(tmp_path, shared):
    with workdir.held(tmp_path):
        begin = time.monotonic()
        process = start(tmp_path, shared)
        output = finish(process, code=5)
        owner = (tmp_path / ".lock").read_text()
    assert output.startswith(f"error: --workdir={tmp_path} is held by {owner}; ")
    assert time.monotonic() - begin < 60
    assert list(tmp_path.iterdir()) == []


def test_r23_a_diverging_run_stops_with_3(tmp_path, shared):
    """The learning rate is traced, so the program is the compiled one."""
    output = train(tmp_path, shared, code=3, **{"optim.peak_learning_rate": 1e37})
    assert "error: step " in output and "of rows [" in output
    logged = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert f"error: step {len(logged) + 1}: loss " in output
    for step in checkpoint.steps(tmp_path / "checkpoints"):
        manifest.verify(tmp_path / "checkpoints" / str(step))


def test_r23_a_last_update_that_leaves_no_finite_loss(tmp_path, shared):
    """Its own loss and gradient are finite, and so are the parameters after it."""
    overrides = {"optim.num_steps": 1, "optim.peak_learning_rate": 1e30}
    overrides |= {"optim.warmup_steps": 0, "optim.schedule": "constant"}
    output = train(tmp_path / "run", shared, code=3, **overrides)
    assert "error: step 1: the held-out loss at rate 0.15 is nan." in output
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_r06_b67_a_run_is_extended_and_changed_by_name(copy, shared):
    """To a last step that is off the interval, and saved."""
    flags = ["--extend_to=10", "--allow_change=optim.weight_decay"]
    output = train(copy, shared, *flags, **{"optim.weight_decay": 0.02})
    assert "goes on from step 8 with optim.num_steps: 8 -> 10" in output
    assert "optim.weight_decay: 0.01 -> 0.02" in output
    found = {
        line["step"]: line["train/learning_rate"]
        for line in lines(copy)
        if "train/learning_rate" in line
    }
    # Step 9 of the schedule of a run of ten steps, two of them warming up.
    assert sorted(found) == list(range(1, 11))
    assert found[9] == pytest.approx(1.5e-3 * 1 / 8) and found[10] == 0
    (first, second) = json.loads((copy / "environment.json").read_text())["starts"]
    assert (first["step"], second["step"]) == (0, 8)
    assert second["changed"]["optim.num_steps"] == [8, 10]
    assert checkpoint.steps(copy / "checkpoints") == [10, 8]
    assert "is finished" in train(copy, shared, *flags, **{"optim.weight_decay": 0.02})


@pytest.mark.slow
def test_r06_extending_a_constant_schedule_is_one_long_run(tmp_path, shared):
    constant = {"optim.schedule": "constant"}
    train(tmp_path / "long", shared, **constant, **{"optim.num_steps": 12})
    train(tmp_path / "short", shared, **constant)
    train(tmp_path / "short", shared, "--extend_to=12", **constant)
    assert_same(tmp_path / "short", tmp_path / "long")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r04_signals_at_random_moments(whole, tmp_path, shared, number):
    """Once the loop has begun; before it there is nothing to save."""
    rng = random.Random(number)
    for n in range(10):
        directory = tmp_path / str(n)
        process = start(directory, shared)
        wait_for(lambda d=directory: (d / "metrics.jsonl").exists(), process)
        time.sleep(rng.uniform(0, 3))
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
        assert process.returncode in (0, 75), err
        train(directory, shared)
        assert_same(directory, whole)


# 300 take half an hour.
KILLS = int(os.environ.get("KILLS", "50"))
SLOW_SAVES = """
import time
from mlm_jax import manifest
def write(*arguments, write=manifest.write):
    time.sleep(0.3)
    write(*arguments)
manifest.write = write
"""


@pytest.mark.slow
def test_r01_killed_at_any_moment(whole, tmp_path, shared):
    """One half at uniform moments of the whole run, one half inside a save."""
    rng = random.Random(0)
    settings = {"before": SLOW_SAVES, "checkpoint.every_steps": 1}
    begin = time.monotonic()
    train(tmp_path / "timed", shared, **settings)
    length = time.monotonic() - begin
    assert_same(tmp_path / "timed", whole)
    kills = inside = runs = 0
    while kills < KILLS:
        runs += 1
        run = tmp_path / str(runs)
        newest = 0
        while True:
            process = start(run, shared, **settings)
            if kills % 2:
                wait_for_save(process, run, rng)
            else:
                wait(process, rng.uniform(0, length))
            process.kill()
            _, err = process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
            kills += 1
            inside += any((run / "checkpoints").glob("*.saving"))
            whole_ones = whole_steps(run)
            assert max(whole_ones) >= newest  # what was saved stays
            newest = max(whole_ones)
            # A save waits for the one before it: of steps that are logged, two at most.
            assert newest >= last_logged(run) - 2
        assert_same(run, whole)
        shutil.rmtree(run)
        print(f"{kills} kills, {inside} inside a save, {runs} runs", flush=True)
    assert inside >= kills / 3


def wait(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def wait_for_save(process, run, rng):
    """Returns at a random moment of the save of a random step, or at the end."""
    for _ in range(rng.randint(1, 3)):
        before = set((run / "checkpoints").glob("*"))
        while process.poll() is None:
            now = set((run / "checkpoints").glob("*"))
            if any(path.suffix == ".saving" for path in now - before):
                break
            time.sleep(0.002)
    wait(process, rng.uniform(0, 0.4))


def whole_steps(run):
    """The steps that are on the disk, all of them whole; 0 is none."""
    found = checkpoint.steps(run / "checkpoints")
    for step in found:
        manifest.verify(run / "checkpoints" / str(step))
    return [*found, 0]


def last_logged(run):
    ledger = run / "ledger.jsonl"
    found = metrics.read_json_lines(ledger) if ledger.exists() else []
    return max((line["step"] for line in found), default=0)


@pytest.mark.slow
def test_r11_a_disk_that_fills_during_a_run(whole, tmp_path, shared):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount).returncode:
        pytest.skip("no small disk can be mounted")
    try:
        process = start(disk / "run", shared)
        wait_for((disk / "run" / "checkpoints" / "4").is_dir, process)
        with open(disk / "other", "wb") as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
                file.flush()
        output = finish(process, code=2)
        assert output.splitlines()[-1].startswith("error: ")
        assert digest(disk / "run").startswith("step 4 ")
        (disk / "other").unlink()
        train(disk / "run", shared)
        assert_same(disk / "run", whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
