"""`python -m mlm_jax.check` finds what is damaged in a run, and says what is sound."""

import json
import shutil
import types

import numpy as np
import pytest

from configs import tiny
from mlm_jax import check, checkpoint, config, manifest, workdir
from mlm_jax.checkpoint import Checkpoints
from mlm_jax.data import rows
from mlm_jax.errors import CheckpointError, DamageError
from tests.test_checkpoint import make_state


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run that was never trained, but looks so to `check`."""
    folder = tmp_path_factory.mktemp("check")
    rng = np.random.default_rng(0)
    words = "the masked word is hidden and others are seen by it".split()
    lines = [" ".join(rng.choice(words, rng.integers(5, 60))) for _ in range(200)]
    (folder / "text.txt").write_text("\n".join(lines))
    c = tiny.get_config()
    c.data.source = f"files:{folder}/text.txt"
    c.data.document = "line"
    c.data.cache_dir = str(folder / "cache")
    c.data.row_length = 32
    c.tokenizer.vocab_size = 300
    c.log.every_steps = 2
    store = rows.prepare(c.data, c.tokenizer, log=lambda line: None)
    run = folder / "run"
    run.mkdir()
    workdir.record(run, store, 0, "1 cpu", {})
    config.save(c, run)
    with Checkpoints(run, keep=2) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, make_state(step))
    logged = [{"step": step, "train/loss": 1.0} for step in (2, 4, 6, 8)]
    logged[2:2] = [{"step": 4, "eval/loss@0.15": 1.0}]
    write(run / "metrics.jsonl", logged)
    write(run / "ledger.jsonl", [{"step": step} for step in range(1, 9)])
    return folder


def write(path, objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))


@pytest.fixture
def run(sound, tmp_path):
    """A copy of the run; its rows are shared."""
    return shutil.copytree(sound / "run", tmp_path / "run")


def checked(run, monkeypatch, capsys, error=None):
    """Returns what is printed, and the lines of the report."""
    monkeypatch.setattr(check, "WORKDIR", types.SimpleNamespace(value=str(run)))
    if error is None:
        check.main([])
    else:
        with pytest.raises(error):
            check.main([])
    out, err = capsys.readouterr()
    return out, dict(line.split(": ", 1) for line in err.splitlines())


def test_a_sound_run(run, monkeypatch, capsys):
    out, report = checked(run, monkeypatch, capsys)
    digest = manifest.read(run / "checkpoints" / "8")["digest"]
    assert out == f"step 8 digest sha256:{digest}\n"
    assert list(report) == [
        "checkpoint 8",
        "checkpoint 4",
        "tokenizer.json",
        "row store",
        "metrics.jsonl",
        "ledger.jsonl",
    ]
    assert all(text.startswith("whole: ") for text in report.values())


def test_damaged_checkpoints(run, monkeypatch, capsys):
    (run / "checkpoints" / "8" / "state" / "_METADATA").write_text("{}")
    out, report = checked(run, monkeypatch, capsys, DamageError)
    assert out.startswith("step 4 digest sha256:")
    assert report["checkpoint 8"].startswith("damaged: state/_METADATA has 2 bytes")
    (run / "checkpoints" / "4" / manifest.NAME).unlink()
    out, report = checked(run, monkeypatch, capsys, CheckpointError)
    assert out == "" and "manifest.json" in report["checkpoint 4"]
    assert (DamageError.exit_code, CheckpointError.exit_code) == (1, 4)


def test_a_checkpoint_that_is_removed_meanwhile_is_no_damage(run, monkeypatch, capsys):
    load = checkpoint.load

    def late(path):
        if path.name == "4":
            shutil.rmtree(path)
        return load(path)

    monkeypatch.setattr(checkpoint, "load", late)
    _, report = checked(run, monkeypatch, capsys)
    assert "checkpoint 8" in report and "checkpoint 4" not in report


@pytest.mark.parametrize(
    "name, lines, found",
    [
        ("metrics", [2, 4, 4, 6, 8], "has step 4 twice"),
        ("metrics", [2, 6, 4, 8], "has step 4 after step 6"),
        ("metrics", [2, 4, 6], "ends at step 6, before step 8"),
        ("ledger", [1, 2, 3, 5, 6, 7, 8], "lacks step 4"),
        ("ledger", [1, 2, 3, 4, 5], "lacks step 6"),
        ("ledger", [1, 2, 2, 3, 4, 5, 6, 7, 8], "has a step twice"),
    ],
)
def test_logs_with_gaps(run, monkeypatch, capsys, name, lines, found):
    write(run / f"{name}.jsonl", [{"step": step} for step in lines])
    _, report = checked(run, monkeypatch, capsys, DamageError)
    text = report.pop(f"{name}.jsonl")
    assert text.startswith("damaged: ") and found in text
    assert all(text.startswith("whole: ") for text in report.values())


def test_a_line_that_is_being_written_is_no_damage(run, monkeypatch, capsys):
    with open(run / "ledger.jsonl", "a") as file:
        file.write('{"step": 9, "mask')
    checked(run, monkeypatch, capsys)


def test_a_log_with_junk_and_a_tokenizer_of_junk(run, monkeypatch, capsys):
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(bytes(100) + b"\n")
    (run / "tokenizer.json").write_text("{")
    _, report = checked(run, monkeypatch, capsys, DamageError)
    assert "line 6 is damaged" in report["metrics.jsonl"]
    assert report["tokenizer.json"].startswith("damaged: ")


def test_a_damaged_row_store_and_one_that_is_gone(sound, tmp_path, monkeypatch, capsys):
    shutil.copytree(sound, tmp_path / "all")
    run = tmp_path / "all" / "run"
    c = config.load(run)
    c.data.cache_dir = str(tmp_path / "all" / "cache")
    config.save(c, run)
    (shard,) = (tmp_path / "all").rglob("*train.array_record*")
    shard.write_bytes(shard.read_bytes()[:-9])
    _, report = checked(run, monkeypatch, capsys, DamageError)
    assert report["row store"].startswith("damaged: ") and shard.name in str(report)
    shutil.rmtree(tmp_path / "all" / "cache")
    _, report = checked(run, monkeypatch, capsys)
    assert report["row store"].startswith("not there, and made anew")
