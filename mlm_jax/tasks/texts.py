"""Texts from files or the terminal, a line each, and results as files."""

import contextlib
import pathlib
import sys

import numpy as np

from mlm_jax.errors import InputError

SUFFIXES = (".npy", ".parquet")


def read_lines(paths):
    """Returns the lines of UTF-8 files, without their ends; of no file, those of the
    standard input. Raises InputError for what cannot be read."""
    found = [_read(path) for path in paths] or [sys.stdin.buffer.read()]
    lines = []
    for name, data in zip(paths or ["the standard input"], found, strict=True):
        try:
            lines += data.decode().splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8: {error}") from error
    return lines


def _read(path):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def output(path):
    """Opens a file for text, or gives the standard output if `path` is None. Raises
    InputError, for errors later on too, if it cannot be written."""
    if path is None:
        yield sys.stdout
        return
    with _refuse_unwritable(path), open(path, "w", encoding="utf-8") as file:
        yield file


def check_vectors_path(path):
    """Raises InputError if `write_vectors` could not write there."""
    if pathlib.Path(path).suffix not in SUFFIXES:
        raise InputError(f"--output={path}; expected a name in {' or '.join(SUFFIXES)}")
    with _refuse_unwritable(path), open(path, "ab"):
        pass


def write_vectors(path, texts, vectors_NxD):
    """Writes `.npy`, float32[N, D], or `.parquet`, with columns `text` and `vector`."""
    with _refuse_unwritable(path):
        if pathlib.Path(path).suffix == ".npy":
            np.save(path, vectors_NxD)
        else:
            _write_parquet(path, texts, vectors_NxD)


def _write_parquet(path, texts, vectors_NxD):
    import pyarrow as pa  # takes a while, and few need it
    import pyarrow.parquet as pq

    width = vectors_NxD.shape[1]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(vectors_NxD.ravel()), width)
    columns = {"text": pa.array(texts, pa.string()), "vector": vectors}
    pq.write_table(pa.table(columns), path)


@contextlib.contextmanager
def _refuse_unwritable(path):
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--output={path} cannot be written: {reason}") from error
