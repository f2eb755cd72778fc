"""Texts from files and results to files, and how long it still takes."""

import io
import sys

import numpy as np
import pytest

from mlm_jax.data import progress
from mlm_jax.errors import InputError
from mlm_jax.tasks import texts


def test_lines_are_what_newlines_end(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes("é one\n\ntwo\x0cthree\u2028four\r\n".encode())
    second.write_bytes(b"five")
    expected = ["é one", "", "two\x0cthree\u2028four", "five"]
    assert texts.read_lines([first, second]) == expected


def test_lines_of_the_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert texts.read_lines([]) == ["one", "two"]


def test_what_cannot_be_read_is_named(tmp_path):
    for data, message in ((b"\xff", "is not UTF-8"), (b"", "no line of text in")):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(InputError, match=message):
            texts.read_lines([tmp_path / "a.txt"])
    with pytest.raises(InputError, match="b.txt cannot be read: No such file"):
        texts.read_lines([tmp_path / "b.txt"])


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match="no/a.npy cannot be written: No such file"):
        texts.check_vectors_path(tmp_path / "no/a.npy")
    with pytest.raises(InputError, match=r"a.csv; expected a name in .npy or .parquet"):
        texts.check_vectors_path(tmp_path / "a.csv")
    with (
        pytest.raises(InputError, match="no/a.jsonl cannot be written"),
        texts.output(tmp_path / "no/a.jsonl"),
    ):
        pass


def test_vectors_are_read_back_from_both_kinds_of_file(tmp_path):
    import pyarrow.parquet as pq

    vectors_NxD = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    lines = ["é", "", "c"]
    texts.write_vectors(tmp_path / "a.npy", lines, vectors_NxD)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), vectors_NxD)
    texts.write_vectors(tmp_path / "a.parquet", lines, vectors_NxD)
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["text"].to_pylist() == lines
    found_NxD = np.array(table["vector"].to_pylist(), np.float32)
    np.testing.assert_array_equal(found_NxD, vectors_NxD)


def test_a_countdown_tells_rate_and_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = []
    tick = progress.Countdown(told.append, "judging", "tokens", 1000)
    for seconds, more in ((0.5, 20), (2.0, 80), (2.1, 0), (4.0, 300)):
        now[0] = seconds
        tick(more)
    assert told == [
        "judging: 100 of 1,000 tokens, 50 tokens/s, 18s left",
        "judging: 400 of 1,000 tokens, 100 tokens/s, 6s left",
    ]
