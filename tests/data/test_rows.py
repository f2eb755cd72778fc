"""The row store: what it holds, when it is built again, and what a kill leaves."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mlm_jax.data import build, pieces, runners, sources, vocabulary
from mlm_jax.data.packing import PackStats, pack
from mlm_jax.data.progress import Progress
from mlm_jax.data.rows import prepare
from mlm_jax.errors import InputError, MlmError
from tests.texts import data_config, documents

TOKENIZER = {
    "kind": "wordpiece",
    "vocab_size": 500,
    "lowercase": True,
    "strip_accents": True,
    "max_characters": 10**8,
    "file": None,
}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    words = np.array("the masked word is hidden and others are seen by it".split())
    lines = [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return data_config(tmp_path)


def quiet(line):
    del line


SOURCE_KEYS = ("source", "document", "on_bad_text", "data_dir")


def expected_rows(data, store):
    """Returns train and validation rows, packed in memory."""
    texts = list(documents(**{key: data[key] for key in SOURCE_KEYS}))
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
    monkeypatch.setattr(build, "ROWS_PER_SHARD", 50)  # several shards
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
import json, pathlib, sys
from mlm_jax.data import build, rows, shards
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
        ("rows._build", "pass"),
        ("shards.write", "pass"),
        ("shards.write", "original(*args, **kwargs)"),
        ("build.pack_part", "original(*args, **kwargs)"),
        ("shards.publish", "pass"),
        ("pathlib.Path.rename", "original(*args, **kwargs)"),
        ("shards.tfds.folder_dataset.write_metadata", "original(*args, **kwargs)"),
        ("shards.publish", "original(*args, **kwargs)"),
    ],
)
def test_a_kill_at_any_stage_leaves_no_broken_store(data, where, after):
    process = start(data, KILLED.format(where=where, after=after))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    store = prepare(data, TOKENIZER, log=quiet)
    train, _ = expected_rows(data, store)
    assert_holds(store.train, train, range(len(train)))
    if where != "shards.publish" or after == "pass":
        left = [p for p in cache_files(data) if "parts" in p.parts]
        assert left == []


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(pieces, "PART_BYTES", 4000)
    monkeypatch.setattr(build, "ROWS_PER_SHARD", 20)


def in_this_process(task, items):
    return map(task, items)


def store_files(data):
    root = pathlib.Path(data["cache_dir"])
    return {p.relative_to(root): p.read_bytes() for p in cache_files(data)}


def test_processes_in_any_order_write_the_same_bytes(data, small_parts, tmp_path):
    alone = data | {"cache_dir": str(tmp_path / "alone")}
    first = prepare(alone, TOKENIZER, log=quiet, run=in_this_process)
    run = runners.in_processes(2)
    prepare(data, TOKENIZER, log=quiet, run=run)
    backwards = data | {"cache_dir": str(tmp_path / "backwards")}
    prepare(
        backwards, TOKENIZER, log=quiet, run=lambda task, items: map(task, items[::-1])
    )
    expected = store_files(alone)
    assert len([p for p in expected if "-train." in p.name]) > 10  # several parts
    assert store_files(data) == store_files(backwards) == expected
    assert first.stats["documents"] == 300
    folder = next(pathlib.Path(data["cache_dir"]).rglob("dataset_info.json")).parent
    assert_tfds_reads(folder, first.train)


def assert_tfds_reads(folder, rows):
    found = tfds.builder_from_directory(folder).as_data_source(split="train")
    assert len(found) == len(rows)
    expected = rows.read(np.arange(len(rows)))
    for n in range(len(rows)):
        np.testing.assert_array_equal(found[n]["tokens"], expected["tokens"][n])
        lengths = found[n]["segment_lengths"]
        padded = expected["segment_lengths"][n]
        np.testing.assert_array_equal(lengths, padded[: len(lengths)])
        bits = np.packbits(expected["word_start"][n])
        np.testing.assert_array_equal(found[n]["word_start"], bits)


def test_a_build_that_was_killed_goes_on(data, small_parts, tmp_path):
    alone = data | {"cache_dir": str(tmp_path / "alone")}
    prepare(alone, TOKENIZER, log=quiet, run=in_this_process)

    def killed(task, items):
        for item in items[:3]:
            yield task(item)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, TOKENIZER, log=quiet, run=killed)
    done, log = [], []

    def noted(task, items):
        done.extend(number for number, _ in items)
        return map(task, items)

    prepare(data, TOKENIZER, log=log.append, run=noted)
    assert done[0] == 3 and any("packing: 3 of" in line for line in log)
    assert store_files(data) == store_files(alone)


def test_an_error_of_the_text_leaves_nothing(data, small_parts, tmp_path):
    with open(tmp_path / "text.txt", "ab") as file:
        file.write(b"\nbad \xff\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    tokenizer = TOKENIZER | {"file": str(tmp_path / "vocab.txt")}
    with pytest.raises(InputError, match="text.txt: line 301, byte offset"):
        prepare(data, tokenizer, log=quiet, run=runners.in_processes(2))
    assert cache_files(data) == []


def test_a_killed_worker_is_told_and_its_part_made_later(data, small_parts, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    tokenizer = TOKENIZER | {"file": str(tmp_path / "vocab.txt")}

    def killed(task, items):
        return runners.in_processes(2)(kill_self, items)

    with pytest.raises(MlmError, match="was killed, perhaps for want of memory"):
        prepare(data, tokenizer, log=quiet, run=killed)
    prepare(data, tokenizer, log=quiet, run=in_this_process)


def kill_self(item):
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_die_with_the_process_that_started_them(tmp_path):
    code = f"""
import pathlib, time
from mlm_jax.data import runners
from tests.data.test_rows import note_and_sleep
if __name__ == "__main__":
    list(runners.in_processes(2)(note_and_sleep, [{str(tmp_path)!r}] * 2))
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, script], env=environment)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    process.kill()
    process.wait()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def note_and_sleep(folder):
    (pathlib.Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(600)


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state[0] != "Z"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.05)


def test_a_tokenizer_learns_from_a_sample_of_every_part(data, small_parts, tmp_path):
    lines = (tmp_path / "text.txt").read_text().split("\n")
    half = len(lines) // 2
    marked = ["first " + line for line in lines[:half]]
    marked += ["second " + line for line in lines[half:]]
    (tmp_path / "text.txt").write_text("\n".join(marked))
    source = sources.open_source(data["source"], document="line", data_dir=None)
    num_parts = len(sources.cut(source))
    assert num_parts > 5

    def learned(limit):
        text = data | {"content": "x"}
        progress = Progress(quiet, "")
        return list(vocabulary.TrainingTexts([source], text, limit, progress))

    whole, some = learned(10**8), learned(2000)
    longest = max(map(len, marked))
    assert 1000 < sum(map(len, some)) < 2000 + num_parts * longest
    assert sum(map(len, whole)) > 10_000
    assert {text.split()[0] for text in some} == {"first", "second"}
    assert [text for text in whole if text in set(some)] == some


def test_a_cache_that_cannot_be_made_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="data.cache_dir=.*text.txt"):
        prepare(data | {"cache_dir": f"{tmp_path}/text.txt"}, TOKENIZER, log=quiet)


def test_two_processes_build_one_store(data):
    processes = [start(data), start(data)]
    lines = [process.communicate()[0].strip().split("\n")[-1] for process in processes]
    assert lines[0] == lines[1]
    assert all(process.returncode == 0 for process in processes)
    assert len(list(pathlib.Path(data["cache_dir"]).rglob("dataset_info.json"))) == 1
