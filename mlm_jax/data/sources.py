"""Named text sources: documents as strings, in an order that never changes.

`bundled:austen`, `files:PATTERN` and `tfds:NAME[/CONFIG][:VERSION][#FEATURE]`, or a
mixture of them by weight: `0.7 tfds:lm1b + 0.3 files:books/*.txt`.
"""

import difflib
import fractions
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from mlm_jax.data.data_sets import DataSet
from mlm_jax.data.lines import TextCounts
from mlm_jax.data.pieces import Part, Piece, part_size, parts
from mlm_jax.data.text_files import TextFiles
from mlm_jax.errors import InputError

BUNDLED = ("austen",)
KINDS = ("bundled", "files", "tfds")
_WEIGHT = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_PLUS = re.compile(rf"\s+\+\s+(?=(?:{_WEIGHT})\s)")
_UNWEIGHTED = re.compile(rf"\s\+\s+(?:(?:{_WEIGHT})\s+)?(?:{'|'.join(KINDS)}):")
_WEIGHTED = re.compile(rf"(?P<weight>{_WEIGHT})\s+(?P<name>.*)", re.DOTALL)


class Source(Protocol):
    """What `TextFiles` and `DataSet` have in common."""

    def fetch(self, log: Callable[[str], object], beam_options: Any) -> None:
        """Downloads what is not here."""

    def fingerprint(self) -> str:
        """Returns a sha256, in hex, that changes when what is read changes."""

    def num_bytes(self) -> int: ...

    def pieces(self, size: int) -> Iterator[Piece]: ...

    def read(
        self, piece: Piece, on_bad_text: str, counts: TextCounts
    ) -> Iterator[str]: ...


class Weighted(NamedTuple):
    weight: fractions.Fraction
    name: str


def mixture(source: str) -> list[Weighted]:
    """Returns the sources that `source` names, each with its weight.

    A source by itself has weight 1. Raises InputError for a weight that is missing or
    zero, and for a source that is named twice.
    """
    if not _WEIGHTED.fullmatch(source):
        found = [Weighted(fractions.Fraction(1), source)]
    else:
        matches = [_WEIGHTED.fullmatch(part) for part in _PLUS.split(source)]
        found = [
            Weighted(fractions.Fraction(match["weight"]), match["name"])
            for match in matches
            if match
        ]
    names = [name for _, name in found]
    for weight, name in found:
        if _UNWEIGHTED.search(name):
            raise InputError(
                f"source={source!r}: each source of a mixture has its weight before"
                " it, as in 0.7 tfds:lm1b + 0.3 files:books/*.txt"
            )
        if not weight:
            raise InputError(f"source={source!r}: the weight of {name} is 0")
        if names.count(name) > 1:
            raise InputError(f"source={source!r} names {name} twice")
    return found


def open_source(name: str, *, document: str, data_dir: str | None) -> Source:
    """Returns what is read under `bundled:NAME`, `files:PATTERN` or `tfds:NAME`.

    Args:
      name: of one source, not of a mixture.
      document: what a document is in a file: `file`, `line`, or `blank_line` for
        lines up to an empty one. Only a document of its own is held in memory.
      data_dir: where TFDS data sets are kept; None is TFDS's own default.

    Raises:
      InputError: for a name that is no source, or files that are not there.
    """
    kind, colon, rest = name.partition(":")
    if kind not in KINDS or not colon or not rest:
        raise InputError(
            f"source={name!r} is not one of bundled:NAME, files:PATTERN,"
            " tfds:NAME[/CONFIG][:VERSION][#FEATURE]"
        )
    if kind == "tfds":
        return DataSet(rest, data_dir)
    if kind == "files":
        return TextFiles.matching(rest, document)
    if rest not in BUNDLED:
        near = difflib.get_close_matches(rest, BUNDLED, 1, cutoff=0)
        raise InputError(
            f"source={name!r} is no bundled corpus; did you mean bundled:{near[0]}?"
        )
    return TextFiles.bundled(rest)


def cut(source: Source) -> list[Part]:
    """Returns the parts of a source: whole documents, in order."""
    size = part_size(source.num_bytes())
    return list(parts(source.pieces(size), size))


def read_part(
    source: Source, part: Part, *, on_bad_text: str, counts: TextCounts
) -> Iterator[str]:
    """Yields the documents of a part, counting them in `counts`.

    Args:
      source: that `part` is of.
      part: from `cut`.
      on_bad_text: `stop`; `skip` the line; or `replace` the bytes by U+FFFD.
      counts: filled while the documents are read.

    Raises:
      InputError: for a source that cannot be read, or text that is not UTF-8.
    """
    for piece in part:
        for text in source.read(piece, on_bad_text, counts):
            if not text or text.isspace():
                counts.empty += 1
                continue
            counts.documents += 1
            counts.characters += len(text)
            yield text


def is_held_out(document: str, fraction: float) -> bool:
    """Returns whether a document belongs to validation, by its content alone."""
    head = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()[:8]
    return int.from_bytes(head) < fraction * 2**64
