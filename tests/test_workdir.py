"""A run's directory: who holds it, and what it remembers."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import types

import pytest

from configs import tiny
from mlm_jax import config, workdir
from mlm_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from mlm_jax.errors import InputError, WorkdirBusyError

ROOT = pathlib.Path(__file__).parents[1]


def make_store(folder, *words, fingerprint="aaaa"):
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, *words]))
    tokenizer = Tokenizer.from_file(path, lowercase=True, strip_accents=True)
    return types.SimpleNamespace(tokenizer=tokenizer, fingerprint=fingerprint)


@pytest.fixture
def run(tmp_path):
    """A directory whose run has begun."""
    path = tmp_path / "run"
    path.mkdir()
    workdir.record(path, make_store(tmp_path, "a"), 0, "1 cpu", {})
    config.save(tiny.get_config(), path)
    return path


def test_r28_one_holder_at_a_time(tmp_path):
    with workdir.held(tmp_path):
        with pytest.raises(WorkdirBusyError) as caught:
            with workdir.held(tmp_path):
                pass
        owner = f"process {os.getpid()} on {socket.gethostname()} since 2"
        assert owner in str(caught.value) and caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []
    with workdir.held(tmp_path):
        pass


def test_r28_a_killed_holder_holds_nothing(tmp_path):
    code = (
        "import sys, time; from mlm_jax import workdir\n"
        "with workdir.held(sys.argv[1]): print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    with process:
        process.stdout.readline()
        with pytest.raises(WorkdirBusyError, match=f"process {process.pid} on"):
            with workdir.held(tmp_path):
                pass
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()  # what it left is no obstacle
    with workdir.held(tmp_path):
        pass


@pytest.mark.parametrize("name", ["a file", "x" * 600, "nul\0", "a file/below"])
def test_r12_what_cannot_be_a_workdir(tmp_path, name):
    (tmp_path / "a file").write_text("")
    with pytest.raises(InputError, match="--workdir=.* cannot be written: ") as caught:
        with workdir.held(tmp_path / name):
            pass
    assert "\n" not in str(caught.value)


def test_r12_spaces_and_other_scripts_in_the_path(tmp_path):
    with workdir.held(tmp_path / "a b" / "\u00fc\u4e2d\u6587"):
        pass


def test_r12_a_read_only_directory(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid():
        disk.chmod(0o555)
    else:  # whom permissions do not stop
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(mount).returncode:
            pytest.skip("nothing can be mounted")
    try:
        with pytest.raises(InputError, match="--workdir=.* cannot be written: "):
            with workdir.held(disk):
                pass
    finally:
        if not os.getuid():
            subprocess.run(["umount", str(disk)], check=True)


def test_what_made_the_steps_is_recorded(run):
    environment = json.loads((run / "environment.json").read_text())
    assert environment["data.fingerprint"] == "aaaa"
    (start,) = environment["starts"]
    assert start["step"] == 0 and start["devices"] == "1 cpu"
    assert start["packages"].keys() == set(workdir.PACKAGES)
    assert all(start["packages"].values())
    if (ROOT / ".git").exists():
        assert len(start["git"].removesuffix("-dirty")) == 40


def test_a_start_that_differs_is_recorded(run, tmp_path, monkeypatch, capsys):
    store = make_store(tmp_path, "a")
    before = (run / "environment.json").read_text()
    workdir.record(run, store, 4, "1 cpu", {})
    assert (run / "environment.json").read_text() == before
    assert capsys.readouterr() == ("", "")

    monkeypatch.setattr(workdir, "_version", lambda package: "9.9")
    workdir.record(run, store, 6, "1 cpu", {"seed": (0, 1)})
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 6]
    assert starts[1]["changed"] == {"seed": [0, 1]}
    out, err = capsys.readouterr()
    assert out == "goes on from step 6 with seed: 0 -> 1\n"
    assert "than from step 0 on" in err and "-> 9.9" in err and err.count("\n") == 1


def test_r06_another_vocabulary_or_other_rows_are_refused(run, tmp_path):
    assert workdir.check_data(run, make_store(tmp_path, "a"), ()) == {}
    # Of the same size: no shape tells them apart.
    other = make_store(tmp_path, "b", fingerprint="bbbb")
    with pytest.raises(InputError) as caught:
        workdir.check_data(run, other, ())
    text = str(caught.value)
    assert "data.fingerprint: 'aaaa' -> 'bbbb'" in text
    assert f"-> '{other.tokenizer.digest}'" in text
    with pytest.raises(InputError, match="tokenizer.digest"):
        workdir.check_data(run, other, ["data.fingerprint"])
    allowed = ["data.fingerprint", "tokenizer.digest"]
    assert workdir.check_data(run, other, allowed).keys() == set(allowed)


def test_without_its_record_the_vocabulary_still_counts(run, tmp_path):
    (run / "environment.json").unlink()
    other = make_store(tmp_path, "b", fingerprint="bbbb")
    with pytest.raises(InputError, match="tokenizer.digest"):
        workdir.check_data(run, other, ())
    (run / "config.json").unlink()  # then the run has not begun
    assert workdir.check_data(run, other, ()) == {}


def test_checkpoints_of_no_config_are_refused(tmp_path):
    c = tiny.get_config()
    assert workdir.check_config(tmp_path, c, ()) == {}
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(InputError, match="has checkpoints, and no config.json"):
        workdir.check_config(tmp_path, c, ())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"starts": 5}', "[" * 99_999])
def test_r21_a_damaged_record_is_named(run, tmp_path, content):
    (run / "environment.json").write_text(content)
    with pytest.raises(InputError, match="environment.json is damaged"):
        workdir.check_data(run, make_store(tmp_path, "a"), ())
