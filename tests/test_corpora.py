"""Any text and any small config: a run that ends well, or one line that says why."""

import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import tiny
from mlm_jax import checkpoint, metrics, train
from mlm_jax.data import rows
from mlm_jax.data.tokenizer import SPECIAL_TOKENS
from mlm_jax.errors import InputError, MlmError
from tests.runs import ROOT

WORDS = "the masked word is hidden and others are seen by it".split()


def some_lines(count=200, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(count)]


def make_config(folder, source, **changes):
    """A config of the smallest size, with a vocabulary given."""
    vocabulary = folder / "vocab.txt"
    if not vocabulary.exists():
        letters = [
            f"{mark}{c}" for c in "abcdefghijklmnopqrstuvwxyz" for mark in ("", "##")
        ]
        vocabulary.write_text("\n".join([*SPECIAL_TOKENS, *WORDS, *letters]))
    c = tiny.get_config()
    c.data.source = source
    c.data.document = "line"
    c.data.cache_dir = str(folder / "cache")
    c.data.row_length = 16
    c.data.batch_size = 4
    c.tokenizer.file = str(vocabulary)
    c.tokenizer.vocab_size = 400
    c.model.num_layers, c.model.width, c.model.mlp_width = 1, 8, 8
    c.parallel.mesh.data = 1
    c.optim.num_steps, c.optim.warmup_steps = 2, 1
    c.eval.num_rows, c.eval.batch_size, c.eval.every_steps = 4, 4, 2
    c.eval.fill_mask = ()
    c.checkpoint.every_steps = c.log.every_steps = 1
    c.update_from_flattened_dict(changes)
    return c


def prepare(c):
    return rows.prepare(c.data, c.tokenizer, log=lambda line: None)


def one_line(error):
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, text
    return text


# --- texts that are unlike text --------------------------------------------------

GOOD = "\n".join(some_lines()).encode()
TEXTS = {
    "not UTF-8": GOOD + b"\n\xff\xfe \xc3( \xed\xa0\x80\n",
    "NUL": GOOD + b"\na\0b\n",
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "CRLF": GOOD.replace(b"\n", b"\r\n"),
    "CR": GOOD.replace(b"\n", b"\r"),
    "U+2028": GOOD + "\na\u2028b\u2029c\u0085d\n".encode(),
    "right to left": GOOD
    + "\n\u202e\u200fabc\u202c \u0645\u0631\u062d\u0628\u0627\n".encode(),
    "combining marks": GOOD + ("\n" + "e" + "\u0301" * 500 + " \u0301\n").encode(),
    "nothing": b"",
    "blank lines": b"\n \n\t\n" * 50,
    "one token": b"the\n",
    "UTF-16": GOOD.decode().encode("utf-16"),
    "gzip": gzip.compress(GOOD),
    "gzip cut short": gzip.compress(GOOD)[:-9],
}


LARGE = {
    "a line of 1 MB": GOOD + b"\n" + b"word " * 200_000 + b"\n",
    "a word of 1 MB": GOOD + b"\n" + b"x" * 1_000_000 + b"\n",
}


@pytest.mark.parametrize(
    "on_bad_text", ["stop", "skip", pytest.param("replace", marks=pytest.mark.slow)]
)
def test_r17_no_line_is_lost_in_silence(tmp_path, on_bad_text):
    """Lines are used, empty, or reported as skipped; else one line says why not."""
    refused = set()
    texts = TEXTS | LARGE if on_bad_text == "replace" else TEXTS
    for name, content in texts.items():
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        c = make_config(tmp_path, f"files:{path}", **{"data.on_bad_text": on_bad_text})
        try:
            stats = prepare(c).stats
        except InputError as error:
            assert "text.txt" in one_line(error)
            refused.add(name)
            continue
        text = gzip.decompress(content) if name == "gzip" else content
        num_lines = len(text.removesuffix(b"\n").split(b"\n"))
        skipped = stats["bad_lines"] if on_bad_text == "skip" else 0
        found = stats["documents"] + stats["empty_documents"] + skipped
        assert found == num_lines, name
    small = {"nothing", "blank lines", "one token", "gzip cut short", "CR"}
    bad = {"not UTF-8", "NUL", "UTF-16"} if on_bad_text == "stop" else {"UTF-16"}
    # All of UTF-16 is bad lines; whether anything is left is no matter here.
    assert refused - {"UTF-16"} == (small | bad) - {"UTF-16"}
    assert on_bad_text != "stop" or "UTF-16" in refused


@pytest.mark.slow
def test_r17_a_word_of_a_megabyte_needs_little_memory(tmp_path):
    for name, content in LARGE.items():
        (tmp_path / "text.txt").write_bytes(content)
        c = make_config(tmp_path, f"files:{tmp_path}/text.txt")
        c.tokenizer.file = None  # learning from it, too
        code = (
            "import json, resource, sys; from mlm_jax.data import rows\n"
            "rows.prepare(*json.loads(sys.argv[1]))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        settings = json.dumps([c.data.to_dict(), c.tokenizer.to_dict()])
        out = subprocess.run(
            [sys.executable, "-c", code, settings],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        assert int(out.split()[-1]) < 1_500_000, name  # kilobytes


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_r17_what_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "text.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = pathlib.Path("/dev/zero")
    with pytest.raises(InputError, match=str(path)) as caught:
        prepare(make_config(tmp_path, f"files:{path}"))
    one_line(caught.value)


# --- names -----------------------------------------------------------------------

NAMES = ["../../x", "/etc/passwd", "a;b", "$(touch x)", "`touch x`", "a\0b", "a\nb"]
NAMES += ["~x", "x" * 600]


@pytest.mark.parametrize("name", NAMES)
def test_r20_a_name_is_a_name(tmp_path, monkeypatch, name):
    """Nothing is made or read for it outside of the cache."""
    home = tmp_path / "a" / "home"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    make_config(home, "")  # its vocabulary
    before = sorted(tmp_path.rglob("*"))
    for source in (f"bundled:{name}", f"tfds:{name}", f"files:{name}"):
        if source == "files:/etc/passwd":
            continue  # the user's own choice
        c = make_config(home, source, **{"data.data_dir": str(home / "sets")})
        with pytest.raises(InputError) as caught:
            prepare(c)
        one_line(caught.value)
    c = make_config(home, "bundled:austen")
    c.tokenizer.file = name
    with pytest.raises(InputError) as caught:
        prepare(c)
    one_line(caught.value)
    new = set(tmp_path.rglob("*")) - set(before)
    assert all((home / "cache") in (path, *path.parents) for path in new)


def test_r20_a_link_out_of_the_workdir_is_not_followed_when_removing(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("4.saving", "8.removing", "12.orbax-checkpoint-tmp-0"):
        (folder / name).symlink_to(elsewhere)
    checkpoint.Checkpoints(tmp_path / "run", keep=1)
    assert list(folder.iterdir()) == []
    assert (elsewhere / "mine").read_text() == "mine"


# --- anything --------------------------------------------------------------------


def random_text(rng):
    """Bytes between good text and noise."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(3000))
    if kind == 1:
        return b""
    if kind == 2:
        return gzip.compress(rng.randbytes(200) if rng.random() < 0.5 else GOOD)
    texts = some_lines(rng.choice([3] + [60] * 5 + [200] * 5), rng.randrange(99))
    lines = [text.encode() for text in texts]
    for _ in range(rng.choice([0, 0, 1, 5])):
        junk = rng.choice([b"\0", b"\xff", b"\r", b"\xef\xbb\xbf", b"\xe2\x80\xa8"])
        junk += rng.randbytes(rng.randrange(9))
        lines.insert(rng.randrange(len(lines) + 1), junk)
    return rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines)


def random_changes(rng):
    """Of the fields that make another program only few values, to compile few."""
    pick = rng.choice
    changes = {
        "data.document": pick(["line"] * 9 + ["file", "blank_line"]),
        "data.on_bad_text": pick(["stop", "skip", "skip", "replace"]),
        "data.packing": pick(["packed", "full", "single"]),
        "data.validation_fraction": pick([0.1] * 3 + [0.2] * 3 + [0.5] * 3 + [0.999]),
        "seed": rng.randrange(2**32),
        "corruption.rate": pick([1e-6, 0.15, 0.5, 1.0]),
        "corruption.mask_frac": pick([0.0, 0.5, 0.8]),
        "corruption.random_frac": pick([0.0] * 4 + [0.1] * 4 + [0.2] * 4 + [0.3]),
        "corruption.strategy": pick(["token"] * 4 + ["word", "span"]),
        "corruption.min_predictions": pick([0, 1]),
        "optim.peak_learning_rate": pick([1e-9, 1e-3, 1e-3, 1.0, 1e30]),
        "optim.weight_decay": pick([0.0, 0.1, 10.0]),
        "optim.clip_norm": pick([1e-3, 1.0, 1e6]),
        "optim.num_steps": pick([1, 2, 3]),
        "optim.warmup_steps": pick([0, 0, 0, 1, 3]),
        "optim.on_nonfinite": pick(["stop", "stop", "skip"]),
        "eval.num_rows": pick([0, 1, 5]),
        "checkpoint.keep_best": pick([True, False]),
    }
    if rng.random() < 0.1:
        changes["tokenizer.file"] = None
    return changes


# 500 take a quarter of an hour.
INPUTS = int(os.environ.get("INPUTS", "100"))


@pytest.mark.slow
def test_r18_any_text_under_any_config(tmp_path):
    rng = random.Random(0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    ends: dict[str, int] = {}

    def too_long(*arguments):
        raise TimeoutError("a minute of computing")

    previous = signal.signal(signal.SIGPROF, too_long)
    try:
        for n in range(INPUTS):
            path = tmp_path / "text.txt"
            path.write_bytes(random_text(rng))
            changes = random_changes(rng)
            c = make_config(tmp_path, f"files:{path}", **changes)
            run = tmp_path / str(n)
            signal.setitimer(signal.ITIMER_PROF, 60)  # other processes do not count
            try:
                train.run(c, run)
            except MlmError as error:
                one_line(error)
                end = type(error).__name__
                assert end in ("InputError", "NonFiniteError"), (n, changes)
            else:
                end = "done"
                check_finite(run, c, changes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            ends[end] = ends.get(end, 0) + 1
            if n % 10 == 9:
                print(n + 1, ends, flush=True)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        jax.config.update("jax_compilation_cache_dir", None)
    assert ends["done"] > INPUTS / 10 and ends["InputError"] > INPUTS / 10
    assert ends["NonFiniteError"]


def check_finite(run, c, changes):
    step, state = checkpoint.restore_latest(run)
    assert step == c.optim.num_steps
    for leaf in jax.tree.leaves(state):
        assert np.isfinite(leaf).all(), changes
    for line in metrics.read_json_lines(run / "metrics.jsonl"):
        if line.get("train/skipped"):
            continue
        # An update without a prediction has no loss.
        losses = [line.get("train/loss", 0.0)]
        if line.get("eval/num_masked@0.15"):
            losses.append(line["eval/loss@0.15"])
        assert all(isinstance(loss, float) for loss in losses), (line, changes)
