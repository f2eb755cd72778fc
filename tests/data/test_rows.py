"""The row store: what it holds, when it is built again, and what a kill leaves."""

import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from mlm_jax.data import sources, staging
from mlm_jax.data.packing import PackStats, pack
from mlm_jax.data.rows import prepare
from mlm_jax.errors import InputError

TOKENIZER = {
    "kind": "wordpiece",
    "vocab_size": 500,
    "lowercase": True,
    "strip_accents": True,
    "file": None,
}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    words = np.array("the masked word is hidden and others are seen by it".split())
    lines = [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return {
        "source": f"files:{tmp_path}/text.txt",
        "document": "line",
        "on_bad_text": "stop",
        "data_dir": None,
        "cache_dir": str(tmp_path / "cache"),
        "row_length": 32,
        "packing": "packed",
        "validation_fraction": 0.1,
    }


def quiet(line):
    del line


def expected_rows(data, store):
    """Returns train and validation rows, packed in memory."""
    keys = ("source", "document", "on_bad_text", "data_dir")
    texts = list(sources.documents(**{key: data[key] for key in keys}))
    found = []
    for is_validation in (False, True):
        fraction = data["validation_fraction"]
        part = [t for t in texts if sources.is_held_out(t, fraction) == is_validation]
        packed = pack(
            store.tokenizer.encode(part),
            length=data["row_length"],
            special=store.tokenizer.special,
            mode=data["packing"],
            stats=PackStats(),
        )
        found.append(list(packed))
    return found


def assert_holds(rows, expected, ids):
    read = rows.read(np.array(ids))
    assert read["tokens"].dtype == read["segment_lengths"].dtype == np.int32
    assert read["word_start"].dtype == bool
    widest = max(len(expected[i].segment_lengths) for i in ids)
    assert read["segment_lengths"].shape == (len(ids), widest)
    for n, i in enumerate(ids):
        np.testing.assert_array_equal(read["tokens"][n], expected[i].tokens)
        np.testing.assert_array_equal(read["word_start"][n], expected[i].word_start)
        lengths = read["segment_lengths"][n]
        np.testing.assert_array_equal(lengths[lengths > 0], expected[i].segment_lengths)


@pytest.mark.parametrize("packing", ["packed", "full", "single"])
@pytest.mark.parametrize("row_length", [32, 45])
def test_rows_are_the_packed_documents_in_order(data, monkeypatch, packing, row_length):
    monkeypatch.setattr(staging, "ROWS_PER_SHARD", 50)  # several shards
    data |= {"packing": packing, "row_length": row_length}
    store = prepare(data, TOKENIZER, log=quiet)
    train, validation = expected_rows(data, store)
    assert (len(store.train), len(store.validation)) == (len(train), len(validation))
    assert len(train) > 100
    assert_holds(store.train, train, range(len(train)))
    assert_holds(store.validation, validation, range(len(validation)))
    assert_holds(store.train, train, [77, 3, 3, 51, len(train) - 1])
    assert store.row_length == store.train.row_length == row_length
    assert store.stats["train_rows"] == len(train)
    assert store.stats["documents"] == 300


def test_large_vocabularies_do_not_overflow(data, tmp_path):
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]
    entries += [f"filler{n}" for n in range(70_000)] + ["masked"]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    tokenizer = TOKENIZER | {"file": str(tmp_path / "vocab.txt")}
    store = prepare(data, tokenizer, log=quiet)
    assert store.train.read(np.arange(len(store.train)))["tokens"].max() == 70_006


def test_a_store_is_reused_and_reports_again(data):
    first_log, second_log = [], []
    first = prepare(data, TOKENIZER, log=first_log.append)
    files = {p: p.stat().st_mtime_ns for p in cache_files(data)}
    second = prepare(data, TOKENIZER, log=second_log.append)
    assert {p: p.stat().st_mtime_ns for p in cache_files(data)} == files
    assert first.fingerprint == second.fingerprint
    assert dict(first.stats) == dict(second.stats)
    assert len(second_log) == 1
    assert second_log[0].split(";")[:2] == first_log[-1].split(";")[:2]
    for word in ("training", "validation rows", "tokens", "fill", "[UNK]", "300 doc"):
        assert word in second_log[0]


def cache_files(data):
    # The locks are opened for writing by every process.
    found = pathlib.Path(data["cache_dir"]).rglob("*")
    return [p for p in found if p.is_file() and p.suffix != ".lock"]


@pytest.mark.parametrize(
    "change",
    [
        {"row_length": 33},
        {"packing": "full"},
        {"validation_fraction": 0.2},
        {"on_bad_text": "skip"},
    ],
)
def test_whatever_changes_rows_changes_their_fingerprint(data, change):
    first = prepare(data, TOKENIZER, log=quiet)
    second = prepare(data | change, TOKENIZER, log=quiet)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("change", [{"vocab_size": 40}, {"kind": "unigram"}])
def test_another_tokenizer_makes_other_rows(data, change):
    first = prepare(data, TOKENIZER, log=quiet)
    second = prepare(data, TOKENIZER | change, log=quiet)
    assert first.fingerprint != second.fingerprint
    assert first.tokenizer.digest != second.tokenizer.digest


def test_changed_text_is_packed_anew(data, tmp_path):
    first = prepare(data, TOKENIZER, log=quiet)
    with open(tmp_path / "text.txt", "a") as file:
        file.write("\nanother line")
    second = prepare(data, TOKENIZER, log=quiet)
    assert first.fingerprint != second.fingerprint
    assert second.stats["documents"] == first.stats["documents"] + 1


def test_the_tokenizer_learns_from_training_documents_only(data, tmp_path):
    fraction = data["validation_fraction"]
    held = next(t for t in map(str, range(10**6)) if sources.is_held_out(t, fraction))
    with open(tmp_path / "text.txt", "a") as file:
        file.write(f"\n{held}\n" * 2)
    store = prepare(data, TOKENIZER, log=quiet)
    assert store.tokenizer.encode([held])[0].tokens.tolist() == [1]
    assert store.stats["unknown"] == 2


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_b15_a_corpus_too_small_is_refused(data, tmp_path, kind):
    (tmp_path / "text.txt").write_text("one sentence of five words")
    message = "text.txt has 1 document and 26 characters: too little to hold out"
    with pytest.raises(InputError, match=message):
        prepare(data, TOKENIZER | {"kind": kind}, log=quiet)
    assert cache_files(data) == []


def test_b15_with_a_vocabulary_given(data, tmp_path):
    (tmp_path / "text.txt").write_text("one sentence of five words")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\n")
    tokenizer = TOKENIZER | {"file": str(tmp_path / "vocab.txt")}
    with pytest.raises(InputError, match="has 1 document and 5 tokens: too little"):
        prepare(data, tokenizer, log=quiet)
    assert cache_files(data) == []


def test_b20_what_was_skipped_is_reported(data, tmp_path):
    with open(tmp_path / "text.txt", "ab") as file:
        file.write(b"\nbad \xc3( and \xff\nnul\0\n")
    log = []
    with pytest.raises(InputError, match="text.txt: line 301"):
        prepare(data, TOKENIZER, log=log.append)
    store = prepare(data | {"on_bad_text": "skip"}, TOKENIZER, log=log.append)
    assert store.stats["bad_lines"] == 2 and store.stats["documents"] == 300
    assert "2 lines with 3 bad bytes (skip)" in log[-1]


def test_b29_the_share_of_unknown_tokens_is_reported(data, tmp_path):
    text = (tmp_path / "text.txt").read_text().split("\n")
    clean = tmp_path / "clean.txt"
    clean.write_text("\n".join(text))
    log = []
    prepare(data, TOKENIZER, log=quiet)
    vocabulary = next(p for p in cache_files(data) if p.name == "tokenizer.json")
    glued = [line + "\U0001f600" if n % 3 == 0 else line for n, line in enumerate(text)]
    (tmp_path / "text.txt").write_text("\n".join(glued))
    tokenizer = TOKENIZER | {"file": str(vocabulary)}
    store = prepare(data, tokenizer, log=log.append)
    assert store.stats["unknown"] == 100
    share = 100 / store.stats["tokens"]
    assert f"[UNK] {share:.3%}" in log[-1] and share > 0.01


SCRIPT = """
import json, sys
from mlm_jax.data import rows, staging
{before}
store = rows.prepare(*json.loads(sys.argv[1]))
assert not {"jax", "tensorflow"} & set(sys.modules)
print(store.fingerprint, len(store.train))
"""


def start(data, before=""):
    code = SCRIPT.replace("{before}", before)
    arguments = [sys.executable, "-c", code, json.dumps([data, TOKENIZER])]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_prepare_needs_neither_tensorflow_nor_jax(data):
    process = start(data)
    out, _ = process.communicate()
    assert process.returncode == 0
    store = prepare(data, TOKENIZER, log=quiet)
    assert out.split()[-2:] == [store.fingerprint, str(len(store.train))]


# Kills the process before or after the stage named.
KILLED = """
import os, signal
original = {where}
def kill(*args, **kwargs):
    {after}
    os.kill(os.getpid(), signal.SIGKILL)
{where} = kill
"""


@pytest.mark.parametrize(
    "where, after",
    [
        ("rows.stage", "pass"),
        ("rows.stage", "original(*args, **kwargs)"),
        ("staging.StagedShard.__call__", "pass"),
        ("rows.PackedRows._shard_iterators_per_split", "pass"),
        ("rows.PackedRows.download_and_prepare", "original(*args, **kwargs)"),
    ],
)
def test_a_kill_at_any_stage_leaves_no_broken_store(data, where, after):
    process = start(data, KILLED.format(where=where, after=after))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    store = prepare(data, TOKENIZER, log=quiet)
    train, _ = expected_rows(data, store)
    assert_holds(store.train, train, range(len(train)))
    left = [p for p in cache_files(data) if {"staged", "incomplete"} & set(p.parts)]
    assert left == []


def test_an_error_while_writing_leaves_nothing(data, monkeypatch):
    def fail(shard):
        raise RuntimeError("disk")

    monkeypatch.setattr(staging.StagedShard, "__call__", fail)
    with pytest.raises(RuntimeError, match="disk"):
        prepare(data, TOKENIZER, log=quiet)
    assert [path.name for path in cache_files(data)] == ["tokenizer.json"]


def test_a_cache_that_cannot_be_made_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="data.cache_dir=.*text.txt"):
        prepare(data | {"cache_dir": f"{tmp_path}/text.txt"}, TOKENIZER, log=quiet)


def test_two_processes_build_one_store(data):
    processes = [start(data), start(data)]
    lines = [process.communicate()[0].strip().split("\n")[-1] for process in processes]
    assert lines[0] == lines[1]
    assert all(process.returncode == 0 for process in processes)
    assert len(list(pathlib.Path(data["cache_dir"]).rglob("dataset_info.json"))) == 1
