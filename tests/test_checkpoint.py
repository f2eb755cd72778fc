"""Checkpoints are whole or not there, verified when read, and never all gone."""

import gc
import os
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax import checkpoint, manifest
from mlm_jax.checkpoint import Checkpoints, digest, restore_latest
from mlm_jax.errors import (
    CheckpointError,
    DamageError,
    InputError,
    NonFiniteError,
)
from tests import helpers

ROOT = pathlib.Path(__file__).parents[1]


def make_state(step, size=10):
    params = {"b": jnp.arange(4.0) + step, "layer": {"kernel": jnp.ones((size, 2))}}
    state = helpers.make_state(params, "adamw", helpers.hparams(), seed=step)
    return state.replace(step=jnp.int32(step))


def abstract(state):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
    )


ABSTRACT = abstract(make_state(0))


def save(workdir, *steps, **settings):
    with Checkpoints(workdir, **{"keep": 9} | settings) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step))


def restore(workdir):
    with Checkpoints(workdir, keep=9) as checkpoints:
        return checkpoints.restore(ABSTRACT)


def steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def contents(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(folder)
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A workdir with the steps 4 and 8; to be copied."""
    workdir = tmp_path_factory.mktemp("two")
    save(workdir, 4, 8)
    return workdir


@pytest.fixture
def copy(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_state_comes_back_bit_by_bit(two):
    step, state = restore(two)
    assert step == 8
    assert jax.tree.structure(state) == jax.tree.structure(make_state(8))
    assert digest(state) == digest(make_state(8))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_what_eight_devices_saved_any_number_restores(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, spread(make_state(3)))
    _, state = restore(tmp_path)
    assert digest(state) == digest(make_state(3))
    step, raw = restore_latest(tmp_path)  # reads nothing of the devices, either
    assert isinstance(raw["params"]["b"], np.ndarray) and step == raw["step"] == 3


def test_the_manifest_has_the_digest_that_runs_are_compared_by(two):
    _, raw = restore_latest(two)
    compared = {name: raw[name] for name in ("params", "opt_state", "step")}
    facts = manifest.verify(two / "checkpoints" / "8")
    assert facts["digest"] == digest(compared)
    listed = {two / "checkpoints" / "8" / name for name in facts["files"]}
    assert listed == set(files(two / "checkpoints" / "8" / "state"))


def test_r08_any_flipped_bit_is_noticed(copy):
    """200 flips over all files of a checkpoint, the manifest included."""
    path = copy / "checkpoints" / "8"
    rng = random.Random(0)
    sound = digest(make_state(8))
    for target in rng.choices(files(path), k=200):
        whole = target.read_bytes()
        if not whole:
            continue
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        target.write_bytes(damaged)
        try:
            state = checkpoint.load(path, ABSTRACT)
        except DamageError as error:
            assert target.relative_to(path).as_posix() in str(error) or (
                target.name == manifest.NAME
            )
        else:  # harmless: white space of the manifest
            assert digest(state) == sound and target.name == manifest.NAME
        target.write_bytes(whole)
    checkpoint.load(path, ABSTRACT)


@pytest.mark.slow
def test_r08_a_flipped_bit_costs_the_steps_since(copy, capsys):
    """200 flips, each in all that a run does at its start."""
    path = copy / "checkpoints" / "8"
    rng = random.Random(1)
    counts = {4: 0, 8: 0}
    targets = [target for target in files(path) if target.stat().st_size]
    for target in rng.choices(targets, k=200):
        whole = target.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        target.write_bytes(damaged)
        step, state = restore(copy)
        assert digest(state) == digest(make_state(step))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == (step == 4)
        assert step == 8 or ("step 8: " in said[0] and target.name in said[0])
        counts[step] += 1
        target.write_bytes(whole)
    print(f"R08: {counts[4]} named and passed over, {counts[8]} harmless")
    assert counts[8] < 20  # white space of the manifest


def rewrite_manifest(path):
    """As one would who may write the checkpoint."""
    facts = manifest.read(path)
    del facts["files"]
    (path / manifest.NAME).unlink()
    manifest.write(path, facts)


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA"])
def test_r21_a_class_named_in_a_checkpoint_is_not_called(
    copy, tmp_path, monkeypatch, name
):
    monkeypatch.syspath_prepend(tmp_path)
    path = copy / "checkpoints" / "8"
    file = path / "state" / name
    text = file.read_text()
    evil = text.replace("np.ndarray", "os.system").replace(
        "orbax.checkpoint._src.handlers.standard_checkpoint_handler", "evil"
    )
    assert evil != text
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    file.write_text(evil)
    rewrite_manifest(path)
    try:
        assert digest(checkpoint.load(path)["params"]) == digest(make_state(8).params)
    except (DamageError, CheckpointError) as error:
        assert "\n" not in str(error)


def test_r21_a_small_file_does_not_fill_the_memory(tmp_path):
    """8 MB of zeros take 40 bytes: such a state was never trained."""
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        state = make_state(4)
        zeros = np.zeros(20_000_000, np.float32)
        checkpoints.save(4, state.replace(params={"b": zeros}))
    with pytest.raises(CheckpointError, match="arrays of 80,000,.* bytes in files of"):
        restore_latest(tmp_path)


def damages(path):
    """Yields (description, how to damage one copy of a checkpoint)."""
    for file in files(path):
        name = file.relative_to(path).as_posix()
        size = file.stat().st_size
        yield name, lambda p: p.unlink()
        if size:
            yield name, lambda p: p.write_bytes(b"")
            yield name, lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2])
            yield name, lambda p: p.write_bytes(bytes(p.stat().st_size))
        yield name, lambda p: p.write_bytes(p.read_bytes() + b"\0")
        yield name, lambda p: (p.unlink(), p.mkdir())
        if name != manifest.NAME:  # of which only what it says matters
            yield name, lambda p: (p.rename(p.parent / "moved"), p.symlink_to("moved"))


def test_r09_any_file_lost_cut_emptied_or_replaced_is_noticed(two, tmp_path):
    count = 0
    for name, damage in damages(two / "checkpoints" / "8"):
        path = tmp_path / str(count) / "8"
        shutil.copytree(two / "checkpoints" / "8", path)
        damage(path / name)
        with pytest.raises(DamageError, match=name.rsplit("/", 1)[-1]):
            checkpoint.load(path, ABSTRACT)
        count += 1
    assert count > 60


def test_b63_the_newest_whole_step_is_used_and_the_damaged_one_named(copy, capsys):
    data = max(
        files(copy / "checkpoints" / "8" / "state"), key=lambda p: p.stat().st_size
    )
    data.write_bytes(data.read_bytes()[:-1])
    before = contents(copy)
    step, state = restore(copy)
    assert step == 4 and digest(state) == digest(make_state(4))
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 8" in line and data.name in line and "bytes" in line
    assert contents(copy) == before  # the damaged one is left to look at
    assert restore_latest(copy)[0] == 4


@pytest.mark.parametrize("kind", ["empty", "no manifest", "another step's", "file"])
def test_b63_what_only_looks_like_a_checkpoint(copy, capsys, kind):
    newest = copy / "checkpoints" / "12"
    if kind == "file":
        newest.write_text("")
    elif kind == "empty":
        newest.mkdir()
    else:
        shutil.copytree(copy / "checkpoints" / "8", newest)
        if kind == "no manifest":
            (newest / manifest.NAME).unlink()
    assert restore(copy)[0] == 8
    assert "step 12" in capsys.readouterr().err


def test_files_that_no_one_listed_do_not_matter(copy):
    (copy / "checkpoints" / "8" / "state" / ".nfs0001").write_text("junk")
    (copy / "checkpoints" / "notes.txt").write_text("mine")
    assert restore(copy)[0] == 8
    assert (copy / "checkpoints" / "notes.txt").exists()


def test_r10_if_none_is_whole_nothing_is_touched(copy):
    for step in "4", "8":
        (copy / "checkpoints" / step / manifest.NAME).unlink()
    before = contents(copy)
    with pytest.raises(CheckpointError, match="step 8: manifest.json.*step 4") as error:
        restore(copy)
    assert "\n" not in str(error.value) and error.value.exit_code == 4
    assert contents(copy) == before


def test_a_whole_checkpoint_of_another_model_is_not_called_damaged(two):
    other = abstract(make_state(0, size=11))
    with Checkpoints(two, keep=9) as checkpoints:
        with pytest.raises(CheckpointError, match=r"kernel.* \(10, 2\) .* \(11, 2\)"):
            checkpoints.restore(other)
    assert restore(two)[0] == 8


def test_a_damaged_step_is_replaced_when_it_is_reached_again(copy):
    (copy / "checkpoints" / "8" / manifest.NAME).unlink()
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[0] == 4
        checkpoints.save(6, make_state(6))
        checkpoints.wait()
        assert steps(copy) == [4, 6, 8]  # 8 is no one of the two that are kept
        checkpoints.save(8, make_state(8))
    assert steps(copy) == [6, 8]
    assert restore(copy)[0] == 8


def test_a_damaged_step_that_is_passed_is_not_counted_as_kept(copy):
    (copy / "checkpoints" / "8" / manifest.NAME).unlink()
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[0] == 4
        checkpoints.save(9, make_state(9))
    assert steps(copy) == [4, 9]


def test_b62_what_killed_saves_left_is_removed_with_one_warning(copy, capsys):
    left = ["30.orbax-checkpoint-tmp-0", "12.saving", "2.removing"]
    for name in left:
        (copy / "checkpoints" / name).mkdir()
        (copy / "checkpoints" / name / "junk").write_text("")
    save(copy, 12)
    assert steps(copy) == [4, 8, 12]
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in left)


@pytest.mark.parametrize(
    "settings, losses, expected",
    [
        (dict(keep=2), {}, [4, 5]),
        (dict(keep=1, keep_every=2), {}, [2, 4, 5]),
        (dict(keep=1, keep_best=True), {1: 3.0, 2: 1.0, 3: 2.0}, [2, 5]),  # B68
        (dict(keep=1, keep_best=True), {}, [5]),
        (dict(keep=1, keep_best=True), {4: float("nan")}, [5]),
        (dict(keep=1, keep_best=True), {3: 1.0, 2: 1.0}, [2, 5]),  # the first of equals
    ],
)
def test_b68_what_is_kept(tmp_path, settings, losses, expected):
    with Checkpoints(tmp_path, **settings) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, make_state(step), eval_loss=losses.get(step))
    assert steps(tmp_path) == expected


def test_r13_a_whole_checkpoint_is_there_at_every_instant(tmp_path, monkeypatch):
    """Looked at whenever a file or directory is about to be renamed or removed."""
    save(tmp_path, 1)
    seen = []

    def watch(change):
        def watched(path, *rest, **named):
            folder = tmp_path / "checkpoints"
            found = checkpoint.steps(folder)
            for step in found:
                manifest.verify(folder / str(step))
            seen.append(max(found))
            return change(path, *rest, **named)

        return watched

    monkeypatch.setattr(pathlib.Path, "rename", watch(pathlib.Path.rename))
    monkeypatch.setattr(shutil, "rmtree", watch(shutil.rmtree))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (2, 3):
            checkpoints.save(step, make_state(step))
            checkpoints.wait()
            seen.append(0)
    first = seen[: seen.index(0)]
    assert set(first) == {1, 2} and first == sorted(first)


def test_r11_without_room_the_numbers_are_said_and_the_older_stay(copy, monkeypatch):
    before = contents(copy)
    usage = shutil.disk_usage(copy)._replace(free=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(InputError, match="needs 1,049,.* has 100,000 free; step 8"):
            save(copy, 12)
    assert contents(copy) == before
    save(copy, 12)
    assert restore(copy)[0] == 12


@pytest.fixture
def small_disk(tmp_path):
    """Eight megabytes; root alone may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount).returncode:
        pytest.skip("no small disk can be mounted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


# TensorStore drops the errors of writes that no one waits for any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_r11_a_disk_that_fills_while_saving(small_disk, monkeypatch):
    rng = np.random.default_rng(0)  # so that compression does not help
    state = make_state(1)
    params = {"b": jnp.asarray(rng.normal(size=900_000), jnp.float32)}
    state = state.replace(params=params)
    monkeypatch.setattr(checkpoint, "MARGIN", -(10**9))  # the check is not enough
    with pytest.raises(InputError, match="step 2 cannot be saved.*step 1 and") as error:
        with Checkpoints(small_disk, keep=9) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            (small_disk / "other").write_bytes(bytes(2_000_000))
            checkpoints.save(2, state)
    assert "\n" not in str(error.value)
    assert steps(small_disk) == [1]  # and nothing that keeps the disk full
    assert restore_latest(small_disk)[0] == 1
    (small_disk / "other").unlink()
    with Checkpoints(small_disk, keep=9) as checkpoints:
        checkpoints.save(2, state)
    assert restore_latest(small_disk)[0] == 2
    gc.collect()  # here, not in another test


def test_r23_what_is_not_finite_is_not_saved(copy):
    state = make_state(12)
    state.params["layer"]["kernel"] = (
        state.params["layer"]["kernel"].at[3, 1].set(jnp.inf)
    )
    with pytest.raises(NonFiniteError, match="step 12: params/layer/kernel"):
        with Checkpoints(copy, keep=1) as checkpoints:
            checkpoints.save(12, state)
    assert steps(copy) == [4, 8]


def test_b64_saving_meanwhile_never_mixes_steps(tmp_path):
    """The buffers of the state that is saved are donated to the next step at once."""
    step_fn = jax.jit(
        lambda s: s.replace(
            step=s.step + 1, params=jax.tree.map(lambda x: x * 1.5 + 1, s.params)
        ),
        donate_argnums=0,
    )
    state, expected = step_fn(make_state(0, size=100_000)), {}
    with Checkpoints(tmp_path, keep=99) as checkpoints:
        for step in range(1, 13):
            compared = {name: getattr(state, name) for name in checkpoint.COMPARED}
            expected[step] = digest(compared)
            checkpoints.save(step, state)
            state = step_fn(state)
    for step, digest_then in expected.items():
        facts = manifest.read(tmp_path / "checkpoints" / str(step))
        assert facts["digest"] == digest_then
    assert restore_latest(tmp_path)[0] == 12  # verified against that digest


def test_an_error_while_saving_is_raised_at_the_next_save(copy, monkeypatch):
    checkpoints = Checkpoints(copy, keep=9)
    with monkeypatch.context() as patch:

        def fail(*arguments):
            raise OSError(5, "Input/output error")

        patch.setattr(manifest, "write", fail)
        checkpoints.save(12, make_state(12))
        with pytest.raises(InputError, match="step 12 .*Input/output error"):
            checkpoints.save(13, make_state(13))
        checkpoints.save(13, make_state(13))
        checkpoints._pending.exception()  # waits
        with pytest.raises(InputError, match="step 13 .*Input/output error"):
            checkpoints.check()  # which the loop does at every step
        checkpoints.check()
    assert steps(copy) == [4, 8]
    with checkpoints:
        checkpoints.save(13, make_state(13))
    assert steps(copy) == [4, 8, 13]


def test_a_run_that_goes_on_may_replace_what_is_being_read(copy, monkeypatch):
    """Listed as 8 and 4; when they are read, only 12 is there."""
    load = checkpoint.load

    def late(path, abstract_state=None):
        if path.name == "8":
            save(copy, 12, keep=1)
            for step in "4", "8":
                shutil.rmtree(path.with_name(step), ignore_errors=True)
        return load(path, abstract_state)

    monkeypatch.setattr(checkpoint, "load", late)
    step, state = restore_latest(copy)
    assert step == 12 and state["step"] == 12


SAVER = """\
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from tests import test_checkpoint as t
with t.Checkpoints(sys.argv[1], keep=2) as checkpoints:
    first, _ = checkpoints.restore(t.ABSTRACT)
    print("from", first or 0, flush=True)
    for step in range((first or 0) + 1, 100_000):
        checkpoints.save(step, t.make_state(step))
        checkpoints.wait()
        print(step, flush=True)
"""


def kill_while_saving(workdir, kills, seed):
    """Kills a process that does nothing but save; checks what it promised each time."""
    rng = random.Random(seed)
    promised = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(workdir)],
            cwd=ROOT,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            first = int(process.stdout.readline().split()[1])
            assert first >= promised
            for _ in range(rng.randrange(3)):
                promised = int(process.stdout.readline())
            # A save takes about a tenth of a second here.
            try:
                process.wait(timeout=rng.uniform(0, 0.2))
            except subprocess.TimeoutExpired:
                process.kill()
            said = process.stdout.read().split()
        promised = int(said[-1]) if said else promised
        step, state = restore_latest(workdir) if promised else (0, None)
        assert step >= promised
        if state:
            assert digest(state) == digest(make_state(step))


def test_r01_kills_while_saving(tmp_path):
    kill_while_saving(tmp_path, kills=3, seed=0)


@pytest.mark.slow
def test_r01_300_kills_while_saving(tmp_path):
    kill_while_saving(tmp_path, kills=300, seed=1)
