"""Long runs, every state of a run, and surroundings that must not matter.

All of it takes minutes: pytest -m slow tests/test_endurance.py
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import tiny
from mlm_jax import checkpoint, manifest, program, train
from mlm_jax.errors import DamageError
from tests import runs
from tests.runs import ROOT, assert_same, finish, start, wait_for

pytestmark = pytest.mark.slow


# --- every state -----------------------------------------------------------------


def test_r02_from_every_step(tmp_path, monkeypatch):
    """60 steps; for each k, what a run has at step k is continued to the end."""
    c = tiny.get_config()
    c.update_from_flattened_dict(
        runs.OVERRIDES
        | {"data.cache_dir": str(tmp_path / "cache"), "parallel.mesh.data": 1}
        | {"optim.num_steps": 60, "checkpoint.every_steps": 1, "checkpoint.keep": 60}
    )
    c.eval.fill_mask = ()
    made = []  # compiled once

    def make_program(*arguments):
        if not made:
            made.append(program.make_program(*arguments))
        return made[0]

    monkeypatch.setattr(train, "make_program", make_program)
    whole = tmp_path / "whole"
    train.run(c, whole)
    c.checkpoint.every_steps = 60
    equal = 0
    for k in range(1, 61):
        run = tmp_path / "run"
        run.mkdir()
        for path in whole.glob("*.json*"):  # the logs with what a kill would lose
            shutil.copy(path, run)
        shutil.copytree(whole / "checkpoints" / str(k), run / "checkpoints" / str(k))
        train.run(c, run)
        assert_same(run, whole)
        shutil.rmtree(run)
        equal += 1
    print(f"R02: {equal} of 60 equal")


# --- kills -----------------------------------------------------------------------

SAVER = """
import random, sys
import jax
jax.config.update("jax_platforms", "cpu")
from tests import test_checkpoint as t
with t.Checkpoints(sys.argv[1], keep=2, keep_best=True) as checkpoints:
    first, _ = checkpoints.restore(t.ABSTRACT)
    for step in range((first or 0) + 1, 100_000):
        loss = 1.0 if step == 3 else 2.0 + random.random()
        checkpoints.save(step, t.make_state(step), eval_loss=loss)
"""


def test_r13_a_whole_checkpoint_at_every_instant_whatever_is_killed(tmp_path):
    """Looked at every 10 ms, while the process that saves and removes is killed."""
    folder = tmp_path / "checkpoints"
    rng = random.Random(0)
    looks = 0
    for _ in range(15):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: newest_whole(folder) >= 4, process)
        deadline = time.monotonic() + rng.uniform(3, 6)
        while time.monotonic() < deadline:
            assert newest_whole(folder) >= 4
            manifest.verify(folder / "3")  # the best one
            looks += 1
            time.sleep(0.01)
        process.kill()
        process.wait()
    checkpoint.Checkpoints(tmp_path, keep=2)
    left = [path.name for path in folder.iterdir() if not path.name.isdigit()]
    assert left == []
    print(f"R13: {looks} looks, 15 kills, always a whole one and the best")


def newest_whole(folder):
    """The newest step that is whole now, 0 if none is."""
    for step in checkpoint.steps(folder):
        with contextlib.suppress(DamageError):  # removed since it was listed
            manifest.verify(folder / str(step))
            return step
    return 0


BUILD = """
import json, sys
from mlm_jax.data import rows
rows.prepare(*json.loads(sys.argv[1]))
"""


def build(c, folder, **env):
    settings = [c.data.to_dict() | {"cache_dir": str(folder)}, c.tokenizer.to_dict()]
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, json.dumps(settings)],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.DEVNULL,
    )


def built_files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_r15_a_cache_whose_building_was_killed_is_the_same(tmp_path):
    c = tiny.get_config()
    c.data.source, c.data.document = f"files:{runs.TEXT}", "line"
    c.data.row_length = 32
    begin = time.monotonic()
    assert build(c, tmp_path / "whole").wait() == 0
    length = time.monotonic() - begin
    expected = built_files(tmp_path / "whole")
    rng = random.Random(0)
    kills = 0
    while kills < 20:
        folder = tmp_path / str(kills)
        env = {
            "PYTHONHASHSEED": str(rng.randrange(1000)),
            "RAYON_NUM_THREADS": str(rng.choice([1, 2, 7])),
        }
        process = build(c, folder, **env)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.2, 1) * length)
        process.kill()
        kills += process.wait() != 0
        assert build(c, folder, **env).wait() == 0
        found = built_files(folder)
        assert found.keys() == expected.keys()
        assert all(found[name] == expected[name] for name in expected)
        shutil.rmtree(folder)
    print(f"R15: {kills} kills, {len(expected)} files the same")


# --- surroundings ----------------------------------------------------------------

OLD_CLOCK = """
import time
now = time.time
time.time = lambda: now() - 10 * 365 * 86400
"""
SURROUNDINGS = [
    dict(env={"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "0"}),
    dict(env={"LC_ALL": "C", "PYTHONHASHSEED": "1"}),
    dict(env={"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}),
    dict(
        env={"PYTHONHASHSEED": "random"}, through=("sh", "-c", 'umask 077; "$@"', "-")
    ),
    dict(before=OLD_CLOCK),
]


@pytest.mark.parametrize("number", range(len(SURROUNDINGS)))
def test_r30_clock_zone_locale_and_hashes(whole, tmp_path, shared, number):
    """Killed, with the times of its files mixed up, and started again elsewhere."""
    run = tmp_path / "run"
    settings = SURROUNDINGS[number] | {"checkpoint.keep": 9}
    settings["checkpoint.every_steps"] = 1
    process = start(run, shared, **settings)
    wait_for((run / "checkpoints" / "5").is_dir, process)
    process.kill()
    process.communicate()
    rng = random.Random(number)
    for path in (run / "checkpoints").rglob("*"):
        os.utime(path, (rng.randrange(2**31), rng.randrange(2**31)))
    finish(start(run, shared, **settings))
    assert_same(run, whole)


def test_r30_from_another_directory(whole, tmp_path, shared):
    overrides = runs.OVERRIDES | {"data.cache_dir": shared / "rows"}
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlm_jax.train", f"--config={ROOT}/configs/tiny.py"]
        + ["--workdir=run", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    finish(process)
    assert_same(tmp_path / "run", whole)


NO_NETWORK = """
import os, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        os._exit(99)
sys.addaudithook(refuse)
"""


def test_r22_without_a_network(whole, tmp_path, shared):
    """In a namespace without one, and no call that looks for one."""
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("no namespace can be made")
    process = start(
        tmp_path / "run", shared, before=NO_NETWORK, through=("unshare", "--net")
    )
    finish(process)
    assert_same(tmp_path / "run", whole)


def test_r28_an_owner_in_another_namespace(whole, tmp_path, shared):
    """Of process ids and host names: to the holder's lock they are nothing."""
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("no namespace can be made")
    run = tmp_path / "run"
    elsewhere = ("unshare", "--fork", "--pid", "--uts", "--kill-child", "sh", "-c")
    renamed = 'hostname elsewhere; exec "$@"'
    slow = "import time\nfrom mlm_jax import manifest\n"
    slow += "write = manifest.write\n"
    slow += "manifest.write = lambda *a: (time.sleep(3), write(*a))\n"
    first = start(run, shared, before=slow, through=(*elsewhere, renamed, "-"))
    wait_for((run / ".lock").exists, first)
    wait_for(lambda: "since" in (run / ".lock").read_text(), first)
    begin = time.monotonic()
    output = finish(start(run, shared), code=5)
    refused = time.monotonic() - begin
    assert "on elsewhere since" in output
    wait_for((run / "checkpoints" / "4").is_dir, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert "resumes at step 4" in finish(start(run, shared))
    assert_same(run, whole)
    print(f"R28: refused after {refused:.1f} s")


def test_r12_a_directory_that_becomes_read_only(tmp_path, shared):
    folder = tmp_path / "run" / "checkpoints"
    process = start(tmp_path / "run", shared, **{"optim.num_steps": 2000})
    wait_for((folder / "4").is_dir, process)
    chattr = ["chattr", "+i", str(folder)]
    if shutil.which("chattr") is None or subprocess.run(chattr).returncode:
        process.kill()
        process.communicate()
        pytest.skip("no directory can be made read-only for root")
    try:
        output = finish(process, code=2)
        assert "cannot be saved" in output.splitlines()[-1]
        assert "and what is before it stay" in output.splitlines()[-1]
        assert checkpoint.restore_latest(tmp_path / "run")[0] >= 4
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


# --- values that are not finite --------------------------------------------------

BROKEN = """
import json, os
import jax.numpy as jnp
from mlm_jax import step
from mlm_jax.data import pipeline
bad = set(json.loads(os.environ["BAD"]))
def read(self, k, read=pipeline.TrainBatches.__getitem__):
    batch = read(self, k)
    return batch | {"epoch": batch["epoch"] + 1000 * (k + 1 in bad)}
pipeline.TrainBatches.__getitem__ = read
def train_step(state, batch, *, loss_fn, train_step=step.train_step, **settings):
    def broken(params, batch, key, **regularisers):
        loss, sums = loss_fn(params, batch, key, **regularisers)
        factor = jnp.where((batch["epoch"] >= 1000).any(), jnp.nan, 1.0)
        return loss * factor, sums | {"loss": sums["loss"] * factor}
    return train_step(state, batch, loss_fn=broken, **settings)
step.train_step = train_step
"""


@pytest.mark.parametrize("first, length", [(1, 1), (1, 200), (17, 3), (59, 1)])
def test_r23_steps_that_are_not_finite(tmp_path, shared, first, length):
    bad = [step for step in range(first, first + length) if step <= 60]
    settings = {
        "before": BROKEN,
        "env": {"BAD": json.dumps(bad)},
        "optim.num_steps": 60,
        "checkpoint.every_steps": 5,
        "checkpoint.keep": 99,
    }
    output = finish(start(tmp_path / "stop", shared, **settings), code=3)
    assert f"error: step {first}: loss nan, gradient norm nan, of rows [" in output
    assert len((tmp_path / "stop" / "ledger.jsonl").read_text().splitlines()) < first

    settings["optim.on_nonfinite"] = "skip"
    stops_at = bad[5] if len(bad) > 5 else None
    process = start(tmp_path / "skip", shared, **settings)
    output = finish(process, code=3 if stops_at else 0)
    for step in bad[:5]:
        assert f"skipped step {step}: loss nan" in output
    if stops_at:
        assert f"error: step {stops_at}: " in output and "6 in a row" in output
    for path in tmp_path.glob("*/checkpoints/*"):
        state = checkpoint.load(path)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# --- a long run ------------------------------------------------------------------

MEASURED = """
import atexit, json, os, time
seen = {"begin": time.monotonic(), "steps": [], "saves": [], "resources": []}
from mlm_jax import checkpoint, metrics
def resources():
    # All memory and its own: pages of libraries come and go as the system pleases.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    total, own = (int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon"))
    counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return total, own, *counts
def update(self, num_tokens, update=metrics.Progress.update):
    since = self._since
    update(self, num_tokens)
    if since is None:  # the first one, or after saving or an evaluation
        seen.setdefault("first", time.monotonic())
        seen["steps"].append(None)
    else:
        seen["steps"].append(self._since - since)
    if len(seen["steps"]) % 100 == 0:
        seen["resources"].append(resources())
metrics.Progress.update = update
def sync(self, sync=metrics.Writer.sync):
    seen["saving"] = time.monotonic()
    sync(self)
metrics.Writer.sync = sync
def save(self, *arguments, save=checkpoint.Checkpoints.save, **settings):
    save(self, *arguments, **settings)
    seen["saves"].append(time.monotonic() - seen["saving"])
checkpoint.Checkpoints.save = save
def leave():
    seen["end"] = time.monotonic()
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
atexit.register(leave)
"""


def measured(run, shared, *flags, **settings):
    """Returns what the run has seen of itself, and what it printed."""
    path = shared / "seen.json"
    env = {"SEEN": str(path), "JAX_LOG_COMPILES": "1"}
    output = finish(start(run, shared, *flags, before=MEASURED, env=env, **settings))
    return json.loads(path.read_text()), output


def spread(counts):
    """Returns the least and the most of the first half, and of the second."""
    halves = np.array_split(counts, 2)
    return [int(extreme(half)) for half in halves for extreme in (np.min, np.max)]


def test_r31_five_thousand_steps(tmp_path, shared):
    settings = {
        "data.batch_size": 32,  # a step of some milliseconds, a save of a hundred
        "optim.num_steps": 5000,
        "eval.every_steps": 100,
        "checkpoint.every_steps": 25,
        "log.every_steps": 10,
    }
    seen, output = measured(tmp_path / "run", shared, **settings)
    total, own, files, threads = np.transpose(seen["resources"])[
        :, 4:
    ]  # from step 500 on
    steps = np.array([s for s in seen["steps"] if s is not None])
    wall = seen["end"] - seen["begin"]
    figures = {
        "steps": len(seen["steps"]),
        "saves": len(seen["saves"]),
        # TensorStore keeps some 20 kB a save.
        "growth after step 500": (np.median(own[-9:]) - np.median(own[:9])) / total[0],
        "open files": spread(files),
        "threads": spread(threads),
        "median step, ms": 1e3 * np.median(steps),
        "p99 / median": np.percentile(steps, 99) / np.median(steps),
        "compilations": output.count("Finished XLA compilation of jit(train_step)"),
        "saving / wall": sum(seen["saves"]) / wall,
        "wall, s": wall,
    }
    print("R31:", figures)
    seen, _ = measured(tmp_path / "run", shared, "--extend_to=5001", **settings)
    figures["restart, s"] = seen["first"] - seen["begin"]
    print("R31:", figures)
    assert figures["steps"] == 5000 and figures["saves"] == 200
    # 2.3% in a process that compiled, as what that freed is taken up again; 0.8% in one
    # with its program from the cache.
    assert figures["growth after step 500"] < 0.03
    # Of open files and threads there are more while a save is written, and one is
    # looked at now and then just as it begins or ends.
    for name in ("open files", "threads"):
        least, most, later_least, later_most = figures[name]
        assert abs(later_least - least) <= 1 and later_most <= most + 3
    assert figures["compilations"] == 1
    assert figures["saving / wall"] <= 0.05
    assert figures["restart, s"] <= 20


def test_r31_goodput(tmp_path, shared):
    """With a kill every 40 seconds: the time of an uninterrupted run over that with
    kills; KILLS=10 takes ten minutes."""
    kills = int(os.environ.get("KILLS", "3"))
    rate = {"data.batch_size": 128, "data.row_length": 64, "eval.every_steps": 10**6}
    rate |= {"checkpoint.every_steps": 20, "model.width": 64, "model.mlp_width": 256}
    seen, _ = measured(tmp_path / "timed", shared, **rate, **{"optim.num_steps": 200})
    step = np.median([s for s in seen["steps"] if s is not None])
    num_steps = int(kills * 40 / step)
    settings = rate | {"optim.num_steps": num_steps}
    begin = time.monotonic()
    for _ in range(kills):
        process = start(tmp_path / "run", shared, **settings)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=40)
        process.kill()
        process.communicate()
    finish(start(tmp_path / "run", shared, **settings))
    goodput = num_steps * step / (time.monotonic() - begin)
    print(f"R31: goodput {goodput:.1%} with {kills} kills, step {1e3 * step:.1f} ms")
    assert goodput >= 0.8
