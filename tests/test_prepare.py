"""The command that prepares data: alone, in processes, under Beam."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nmasked\nword\nis\nhidden\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five megabytes of lines, which are two parts, and a small vocabulary."""
    path = tmp_path_factory.mktemp("prepare")
    rng = np.random.default_rng(0)
    words = np.array("the masked word is hidden and others are seen by it".split())
    lines = [" ".join(rng.choice(words, 400)) for _ in range(2500)]
    (path / "text.txt").write_text("\n".join(lines))
    (path / "vocab.txt").write_text(VOCABULARY)
    return path


def prepare(folder, cache, *flags, code=0, **overrides):
    """Runs the command; returns what it printed and the files of the store."""
    fields = {
        "data.source": f"files:{folder}/text.txt",
        "data.document": "line",
        "data.cache_dir": cache,
        "tokenizer.file": folder / "vocab.txt",
    }
    done = subprocess.run(
        [sys.executable, "-m", "mlm_jax.prepare", "--config=configs/tiny.py"]
        + [f"--config.{name}={value}" for name, value in (fields | overrides).items()]
        + list(flags),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    found = pathlib.Path(cache).rglob("packed_rows/**/*")
    files = {p.relative_to(cache): p.read_bytes() for p in found if p.is_file()}
    return done.stdout + done.stderr, files


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    return prepare(folder, tmp_path_factory.mktemp("alone"), "--workers=1")


def test_training_finds_what_was_prepared(folder, tmp_path):
    (tmp_path / "text.txt").write_text("the word is\nmasked\n" * 40 + "hidden\n" * 9)
    source = {"data.source": f"files:{tmp_path}/text.txt"}
    source["data.validation_fraction"] = 0.5
    text, files = prepare(folder, tmp_path / "cache", **source)
    assert "89 documents; built in" in text and len(files) >= 4
    text, again = prepare(folder, tmp_path / "cache", **source)
    assert "89 documents; found in" in text and again == files


@pytest.mark.slow
def test_processes_write_what_one_writes(folder, alone, tmp_path):
    text, files = prepare(folder, tmp_path, "--workers=2")
    assert "packing: 1 parts" in text and "2,500 documents; built in" in text
    assert len(files) >= 6 and files == alone[1]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus():
    """With a small sample to learn from, so that less text is beyond it."""
    done = subprocess.run(
        [sys.executable, "experiments/prepare_memory.py", "--megabytes=10,50", "--"]
        + ["--config.tokenizer.max_characters=5000000"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(int, re.findall(r"peak (\d+) MiB", done.stdout))
    assert large < 1.1 * small


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--", "--runner=DirectRunner"], "unexpected argument '--runner"),
        (["--beam", "--workers=2"], "--workers is not for --beam"),
    ],
)
def test_flags_that_cannot_be(folder, tmp_path, flags, message):
    text, files = prepare(folder, tmp_path, *flags, code=2)
    assert message in text and "Traceback" not in text and not files


# --- under Beam --------------------------------------------------------------------


@pytest.fixture(scope="module")
def beam():
    pytest.importorskip("apache_beam", reason="apache-beam is optional: mlm_jax[beam]")


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_beam_writes_what_one_process_writes(beam, folder, alone, tmp_path, options):
    options = ["--", "--runner=DirectRunner", *options]
    text, files = prepare(folder, tmp_path, "--beam", *options)
    assert "2,500 documents; built in" in text
    assert files == alone[1]


@pytest.mark.parametrize(
    "option, message",
    [
        ("--runer=DirectRunner", "Beam has no pipeline option '--runer=DirectRunner'"),
        ("--runner=Foo", "Unexpected pipeline runner: Foo"),
        ("x", "Beam has no pipeline option 'x'"),
    ],
)
def test_options_that_beam_does_not_know(beam, folder, tmp_path, option, message):
    text, files = prepare(folder, tmp_path, "--beam", "--", option, code=2)
    assert f"error: {message}" in text.replace("Beam's pipeline options: ", "")
    assert not files


def test_beam_names_what_is_wrong_with_the_text(beam, folder, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"the word\n\xff\n")
    source = {"data.source": f"files:{tmp_path}/bad.txt"}
    text, files = prepare(folder, tmp_path / "cache", "--beam", code=2, **source)
    assert "bad.txt: line 2, byte offset 9: bytes that are not UTF-8" in text
    assert not files


def test_without_beam_it_is_said_how_to_get_it(tmp_path):
    (tmp_path / "apache_beam.py").write_text("raise ImportError('not here')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from mlm_jax.data import runners; runners.beam_options([])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert "pip install 'mlm_jax[beam]'" in done.stderr
