"""Texts from files or the terminal, a line each, and results as files."""

import contextlib
import pathlib
import sys

import numpy as np

from mlm_jax.errors import InputError

SUFFIXES = (".npy", ".parquet")


def read_lines(paths):
    """Returns the lines of UTF-8 files, without their ends; of no file, those of the
    standard input. Raises InputError for what cannot be read, and if there is none."""
    names = [str(path) for path in paths] or ["the standard input"]
    found = [read_bytes(path) for path in paths] or [sys.stdin.buffer.read()]
    lines: list[str] = []
    for name, data in zip(names, found, strict=True):
        try:
            # Not str.splitlines: a form feed in a line does not end it.
            lines += data.decode().removesuffix("\n").split("\n") if data else []
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8: {error}") from error
    if not lines:
        raise InputError(f"no line of text in {', '.join(names)}.")
    return [line.removesuffix("\r") for line in lines]


def read_bytes(path):
    """Raises InputError, naming the file, if it cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def output(path, keep=0):
    """Opens a file for text after its first `keep` bytes, or gives the standard output
    if `path` is None. Raises InputError, for errors later on too, if it cannot be
    written."""
    if path is None:
        yield sys.stdout
        return
    with _refuse_unwritable(path), open(path, "a", encoding="utf-8") as file:
        file.truncate(keep)
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
