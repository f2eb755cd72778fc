"""Runs on a real SLURM of one node, from submission to the same bits as here."""

import os
import re
import subprocess
import sys
import time

import pytest

from mlm_jax import checkpoint, slurm_flags
from mlm_jax.errors import InputError
from tests import cluster, runs

LAUNCH = [sys.executable, "-m", "mlm_jax.launch"]


def submit(environment, workdir, shared, *flags, code=0, **overrides):
    """Runs the command; returns what it printed."""
    overrides = runs.OVERRIDES | {"data.cache_dir": shared / "rows"} | overrides
    done = subprocess.run(
        [*LAUNCH, "--config=configs/tiny.py", f"--workdir={workdir}", *flags]
        + [f"--config.{name}={value}" for name, value in overrides.items()],
        cwd=runs.ROOT,
        env=environment
        | {
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(runs.ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_what_is_not_ours_goes_to_training():
    ours = ["--slurm", "--slurm_nodes=2", "-slurm_mem=4GB", "--noslurm"]
    theirs = ["--config=a.py", "--config.data.source=files:--slurm", "-workdir", "runs"]
    assert slurm_flags.others([*theirs[:2], *ours[:3], *theirs[2:]]) == theirs
    with pytest.raises(InputError, match="write --slurm_nodes=VALUE"):
        slurm_flags.others(["--slurm_nodes", "2"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--slurm is missing"),
        (["--slurm", "--slurm_nodez=2"], "Did you mean: slurm_nodes"),
        (["--slurm", "--slurm_nodes=2"], "config.parallel.mode = pmap is for one"),
    ],
)
def test_what_cannot_run_is_not_submitted(tmp_path, shared, flags, message):
    environment = os.environ | {"PATH": str(tmp_path)}
    text = submit(environment, tmp_path / "run", shared, *flags, code=2)
    assert message in text and not (tmp_path / "run").exists()


def test_no_cluster_is_said_in_one_line(tmp_path, shared):
    pytest.importorskip("submitit", reason="submitit is optional: mlm_jax[slurm]")
    environment = os.environ | {"PATH": str(tmp_path)}
    text = submit(environment, tmp_path / "run", shared, "--slurm", code=2)
    assert "SLURM did not take the job: Could not detect" in text


# --- on a cluster --------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    pytest.importorskip("submitit", reason="submitit is optional: mlm_jax[slurm]")
    if cluster.missing():
        pytest.skip(f"no SLURM here: {', '.join(cluster.missing())} not installed")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge wants its socket where all may come
    with cluster.running(folder) as environment:
        yield environment


def start(slurm, workdir, shared, *flags, **overrides):
    """Returns the id of the job."""
    text = submit(slurm, workdir, shared, "--slurm", *flags, **overrides)
    return re.search(r"job (\d+): see", text)[1]


def state(slurm, job):
    """Returns what SLURM says of the job, as a dict."""
    text = cluster.run(slurm, "scontrol", "show", "job", "-o", job)
    return dict(item.partition("=")[::2] for item in text.split())


def wait_for(slurm, job, *states, seconds=300):
    deadline = time.monotonic() + seconds
    while state(slurm, job)["JobState"] not in states:
        assert time.monotonic() < deadline, state(slurm, job)
        time.sleep(0.2)


def logs(workdir):
    files = sorted((workdir / "slurm").glob("*.out")) + sorted(
        (workdir / "slurm").glob("*.err")
    )
    return "\n".join(file.read_text() for file in files)


def finish(slurm, job, workdir):
    wait_for(slurm, job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert state(slurm, job)["JobState"] == "COMPLETED", logs(workdir)


@pytest.mark.slow
def test_a_job_trains_what_a_shell_trains(slurm, whole, shared, tmp_path):
    workdir = tmp_path / "run"
    options = "--slurm_options=comment=by-launch"
    job = start(slurm, workdir, shared, "--slurm_cpus_per_task=2", options)
    assert state(slurm, job)["Comment"] == "by-launch"
    assert state(slurm, job)["JobName"] == "run"
    finish(slurm, job, workdir)
    assert runs.digest(workdir) == runs.digest(whole)
    assert runs.lines(workdir) == runs.lines(whole)
    assert "starts: " in logs(workdir)


@pytest.mark.slow
def test_two_tasks_are_one_run(slurm, whole, shared, tmp_path):
    workdir = tmp_path / "run"
    mode = {"parallel.mode": "shard_map"}
    job = start(slurm, workdir, shared, "--slurm_tasks_per_node=2", **mode)
    assert state(slurm, job)["NumTasks"] == "2"
    finish(slurm, job, workdir)
    alone, together = runs.lines(whole), runs.lines(workdir)
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    for ours, theirs in zip(together, alone, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4), name
    assert checkpoint.steps(workdir / "checkpoints")[0] == 8


LONG = {"optim.num_steps": 1000, "checkpoint.every_steps": 1000}
LONG |= {"eval.every_steps": 1000, "log.every_steps": 1000}


def is_training(workdir):
    ledger = workdir / "ledger.jsonl"
    return ledger.exists() and ledger.read_text().count("\n") > 20


@pytest.mark.slow
def test_a_job_at_the_end_of_its_time_saves_and_goes_on(slurm, shared, tmp_path):
    workdir = tmp_path / "run"
    job = start(slurm, workdir, shared, **LONG)
    runs_until(lambda: is_training(workdir), slurm, job, workdir)
    # What SLURM does 90 seconds before the end of a job's time.
    cluster.run(slurm, "scancel", "--signal=USR2", job)
    wait_for(slurm, job, "PENDING")
    (saved,) = checkpoint.steps(workdir / "checkpoints")
    assert 20 <= saved < 1000
    assert state(slurm, job)["Restarts"] == "1"
    cluster.run(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now")
    finish(slurm, job, workdir)
    assert f"resumes at step {saved:,}" in logs(workdir)
    assert checkpoint.steps(workdir / "checkpoints")[0] == 1000


@pytest.mark.slow
def test_a_cancelled_job_saves_and_does_not_come_back(slurm, shared, tmp_path):
    workdir = tmp_path / "run"
    job = start(slurm, workdir, shared, **LONG)
    runs_until(lambda: is_training(workdir), slurm, job, workdir)
    cluster.run(slurm, "scancel", job)
    wait_for(slurm, job, "CANCELLED", seconds=60)
    (saved,) = checkpoint.steps(workdir / "checkpoints")
    assert 20 <= saved < 1000 and f"after saving step {saved:,}" in logs(workdir)
    time.sleep(5)
    assert state(slurm, job)["JobState"] == "CANCELLED"


def runs_until(condition, slurm, job, workdir, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert state(slurm, job)["JobState"] in ("PENDING", "RUNNING"), logs(workdir)
        assert time.monotonic() < deadline, logs(workdir)
        time.sleep(0.2)


QUESTION = '''"""Is an array of jobs the same as one command here?"""

from mlm_jax.experiment.sweep import values

CONFIG = "configs/tiny.py"
ARMS = values("corruption.rate", 0.15, 0.3)
SEEDS = (0,)
BASELINE = "rate=0.15"
METRIC = "eval/loss@0.15"
SETTINGS = {settings}
'''


@pytest.mark.slow
def test_an_experiment_is_an_array_of_jobs(slurm, shared, tmp_path):
    settings = runs.OVERRIDES | {"data.cache_dir": str(shared / "rows")}
    file = tmp_path / "question.py"
    file.write_text(QUESTION.format(settings=repr(settings)))
    command = [sys.executable, "-m", "mlm_jax.sweep", str(file)]
    environment = slurm | {
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(
            [str(runs.ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }
    here, there = tmp_path / "here", tmp_path / "there"
    for flags in ([f"--workdir={here}"], [f"--workdir={there}", "--slurm"]):
        done = subprocess.run(
            [*command, *flags],
            cwd=runs.ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    array = re.search(r"array (\d+) of 2 tasks", done.stdout)[1]
    for task in (0, 1):
        wait_for(slurm, f"{array}_{task}", "COMPLETED", "FAILED")
        assert state(slurm, f"{array}_{task}")["JobState"] == "COMPLETED", logs(there)
    for arm in ("rate=0.15", "rate=0.3"):
        assert runs.digest(here / arm / "seed0") == runs.digest(there / arm / "seed0")
