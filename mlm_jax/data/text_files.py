"""Documents from plain text files, gzip or not, and the pieces they are read in."""

import dataclasses
import glob
import gzip
import hashlib
import importlib.resources
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from mlm_jax.data.lines import TextCounts, clean_lines
from mlm_jax.data.pieces import Piece
from mlm_jax.errors import InputError

_CHAPTER = re.compile(r"(CHAPTER|Chapter) ([IVXLC]+|[0-9]+)\.?\s*")
_BLANK = " \t\r\f\v"


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Files in reading order, and what a document is in them: a key of `DOCUMENTS`."""

    paths: tuple[str, ...]
    document: str

    @classmethod
    def matching(cls, pattern: str, document: str) -> "TextFiles":
        """The files of a glob pattern, sorted. Raises InputError if there is none."""
        path = os.path.expanduser(pattern)
        if os.path.isdir(path):
            raise InputError(
                f"files:{pattern} is a directory; name its files, such as"
                f" files:{os.path.join(pattern, '*.txt')}"
            )
        # A file whose name holds glob characters is still a file.
        found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        paths = tuple(sorted(path for path in found if not os.path.isdir(path)))
        for path in paths:
            if not os.path.isfile(path):  # a pipe would be waited for, and read once
                raise InputError(f"{path} is not a regular file")
        if not paths:
            raise InputError(
                f"files:{pattern} matches no file (seen from {os.getcwd()})"
            )
        return cls(paths, document)

    @classmethod
    def bundled(cls, name: str) -> "TextFiles":
        """The text files of a folder of this package, cut into chapters."""
        folder = importlib.resources.files("mlm_jax.data") / name
        paths = [str(p) for p in folder.iterdir() if p.name.endswith(".txt")]
        return cls(tuple(sorted(paths)), "chapter")

    def fetch(self, log: Callable[[str], object], beam_options=None) -> None:
        """Does nothing: files are here."""

    def fingerprint(self) -> str:
        """sha256 of what is read: content in reading order, wherever it lies."""
        digest = hashlib.sha256(b"files")
        for path in self.paths:
            with _refuse_unreadable(path), open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def num_bytes(self) -> int:
        return sum(_size(path) for path in self.paths)

    def pieces(self, size: int) -> Iterator[Piece]:
        """Yields the files in pieces of about `size` bytes; none cuts a document."""
        for path in self.paths:
            with _refuse_unreadable(path), open(path, "rb") as file:
                end = _size(path)
                cuts = [0]
                if self.document in _SEEK and not _is_gzip(file):
                    cuts += _cuts(file, size, end, _SEEK[self.document])
                for start, stop in zip(cuts, [*cuts[1:], end], strict=True):
                    yield Piece(path, start, stop, stop - start)

    def read(self, piece: Piece, on_bad_text: str, counts: TextCounts) -> Iterator[str]:
        """Yields the documents of a piece, empty ones too."""

        def where(lines_before: int, offset: int) -> str:
            with open(path, "rb") as file:
                first = sum(1 for _ in _until(file, piece.start)) + 1
            return f"{path}: line {first + lines_before}, byte offset {offset}"

        path = piece.name
        with _refuse_unreadable(path), open(path, "rb") as file:
            if _is_gzip(file):
                lines: Iterable[bytes] = gzip.open(file)
            else:
                file.seek(piece.start)
                lines = _until(file, piece.stop - piece.start)
            clean = clean_lines(
                lines,
                offset=piece.start,
                where=where,
                on_bad_text=on_bad_text,
                counts=counts,
            )
            yield from DOCUMENTS[self.document](clean)


class _refuse_unreadable:
    """Turns what the system says about a file into one sentence with its name."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (OSError, EOFError, zlib.error)):
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.path} cannot be read: {reason}") from error


def _size(path: str) -> int:
    with _refuse_unreadable(path):
        return os.path.getsize(path)


def _is_gzip(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(2)
    file.seek(0)
    return head == b"\x1f\x8b"


def _until(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields lines until `size` bytes are read."""
    while size > 0 and (line := file.readline()):
        size -= len(line)
        yield line


def _cuts(file: BinaryIO, size: int, end: int, seek) -> Iterator[int]:
    """Yields where pieces but the first start."""
    start = 0
    while start + size < end:
        file.seek(start + size - 1)  # a line that ends there is whole
        seek(file)
        start = file.tell()
        if start < end:
            yield start


def _seek_line(file: BinaryIO) -> None:
    file.readline()


def _seek_blank_line(file: BinaryIO) -> None:
    file.readline()
    while (line := file.readline()) and line.strip(_BLANK.encode() + b"\n"):
        pass


# How to go on to where a document may start; not found here: nowhere inside a file.
_SEEK = {"line": _seek_line, "blank_line": _seek_blank_line}


def _whole_file(lines: Iterable[str]) -> Iterator[str]:
    yield "\n".join(lines)


def _each_line(lines: Iterable[str]) -> Iterator[str]:
    yield from lines


def _blank_line_separated(lines: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if line.strip(_BLANK):
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def _chapters(lines: Iterable[str]) -> Iterator[str]:
    """Starts a document at every chapter heading but the first."""
    block: list[str] = []
    is_first = True
    for line in lines:
        if _CHAPTER.fullmatch(line):
            if not is_first:
                yield "\n".join(block)
                block = []
            is_first = False
        block.append(line)
    yield "\n".join(block)


DOCUMENTS: dict[str, Callable[[Iterable[str]], Iterator[str]]] = {
    "file": _whole_file,
    "blank_line": _blank_line_separated,
    "line": _each_line,
    "chapter": _chapters,
}
