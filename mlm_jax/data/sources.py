"""Named text sources: documents as strings, in an order that never changes.

`bundled:austen`, `files:PATTERN` and `tfds:NAME[/CONFIG][:VERSION]`. Lines end at
`\\n` and nowhere else, whatever Unicode says; a byte order mark, `\\r\\n` and bytes
that are not UTF-8 never get past this file.
"""

import bisect
import dataclasses
import difflib
import glob
import gzip
import hashlib
import importlib.resources
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator

from mlm_jax.data.feature_files import refuse_foreign_classes
from mlm_jax.errors import InputError

BUNDLED = ("austen",)
# Bytes that are not UTF-8 decode to these (PEP 383); NUL is no text either.
_BAD = re.compile("[\x00\udc80-\udcff]")
_CHAPTER = re.compile(r"(CHAPTER|Chapter) ([IVXLC]+|[0-9]+)\.?\s*")
_BLANK = " \t\r\f\v"


@dataclasses.dataclass
class TextCounts:
    """What a pass over a source met."""

    documents: int = 0  # yielded
    empty: int = 0  # nothing but white space, not yielded
    characters: int = 0
    bad_lines: int = 0  # lines skipped or mended
    bad_bytes: int = 0  # the offending bytes in them


def documents(
    source: str,
    *,
    document: str,
    on_bad_text: str,
    data_dir: str | None,
    counts: TextCounts | None = None,
) -> Iterator[str]:
    """Yields the documents of `source`, counting them in `counts`.

    Args:
      source: `bundled:NAME`, `files:PATTERN` or `tfds:NAME[/CONFIG][:VERSION]`.
      document: what a document is in a file: `file`, `line`, or `blank_line` for
        lines up to an empty one. Only a document of its own is held in memory.
      on_bad_text: `stop`; `skip` the line; or `replace` the bytes by U+FFFD.
      data_dir: where TFDS data sets were prepared; None is TFDS's own default.
      counts: filled while the documents are read.

    Raises:
      InputError: for a source that cannot be read, or text that is not UTF-8.
    """
    counts = TextCounts() if counts is None else counts
    kind, name = _parse(source)
    if kind == "tfds":
        found = _tfds_documents(name, data_dir, on_bad_text, counts)
    else:
        split = _chapters if kind == "bundled" else _SPLITS[document]
        found = _file_documents(_paths(kind, name), split, on_bad_text, counts)
    for text in found:
        if not text or text.isspace():
            counts.empty += 1
            continue
        counts.documents += 1
        counts.characters += len(text)
        yield text


def fingerprint(source: str, *, data_dir: str | None) -> str:
    """Returns a sha256, in hex, that changes when what `source` reads changes.

    Files count by content in reading order, wherever they lie; a TFDS data set by
    name, version, what it says of itself, and the size of its files.
    """
    kind, name = _parse(source)
    digest = hashlib.sha256(kind.encode())
    if kind == "tfds":
        builder = _tfds_builder(name, data_dir)
        digest.update(builder.info.full_name.encode())
        for path in sorted(builder.data_path.iterdir()):
            digest.update(f"{path.name} {path.stat().length}".encode())
            if path.suffix == ".json":
                digest.update(path.read_bytes())
        return digest.hexdigest()
    for path in _paths(kind, name):
        with _refuse_unreadable(path), open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def is_held_out(document: str, fraction: float) -> bool:
    """Returns whether a document belongs to validation, by its content alone."""
    head = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()[:8]
    return int.from_bytes(head) < fraction * 2**64


def _parse(source: str) -> tuple[str, str]:
    kind, colon, name = source.partition(":")
    if kind not in ("bundled", "files", "tfds") or not colon or not name:
        raise InputError(
            f"source={source!r} is not one of bundled:NAME, files:PATTERN,"
            " tfds:NAME[/CONFIG][:VERSION]"
        )
    if kind == "bundled" and name not in BUNDLED:
        near = difflib.get_close_matches(name, BUNDLED, 1, cutoff=0)
        raise InputError(
            f"source={source!r} is no bundled corpus; did you mean bundled:{near[0]}?"
        )
    return kind, name


# --- files -----------------------------------------------------------------------


def _paths(kind: str, name: str) -> list[str]:
    if kind == "bundled":
        folder = importlib.resources.files("mlm_jax.data") / name
        return sorted(str(p) for p in folder.iterdir() if p.name.endswith(".txt"))
    pattern = os.path.expanduser(name)
    if os.path.isdir(pattern):
        raise InputError(
            f"files:{name} is a directory; name its files, such as"
            f" files:{os.path.join(name, '*.txt')}"
        )
    # A file whose name holds glob characters is still a file.
    found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    paths = sorted(path for path in found if not os.path.isdir(path))
    for path in paths:
        if not os.path.isfile(path):  # a pipe would be waited for, and read once only
            raise InputError(f"{path} is not a regular file")
    if not paths:
        raise InputError(f"files:{name} matches no file (seen from {os.getcwd()})")
    return paths


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


def _open(path: str):
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else open(path, "rb")


def _file_documents(paths, split, on_bad_text, counts) -> Iterator[str]:
    for path in paths:
        with _refuse_unreadable(path), _open(path) as lines:
            yield from split(_clean_lines(lines, path, on_bad_text, counts))


def _clean_lines(
    lines: Iterable[bytes], name: str, on_bad_text: str, counts: TextCounts
) -> Iterator[str]:
    """Yields lines without their end; `lines` were split after `\\n` only."""
    offset = 0
    for number, line in enumerate(lines, 1):
        start, offset = offset, offset + len(line)
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            line, start = line[3:], 3
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        text = line.decode("utf-8", "surrogateescape")
        bad = _BAD.search(text)
        if bad:
            if on_bad_text == "stop":
                before = text[: bad.start()].encode("utf-8", "surrogateescape")
                what = "a NUL byte" if bad[0] == "\0" else "bytes that are not UTF-8"
                raise InputError(
                    f"{name}: line {number}, byte offset {start + len(before)}: {what};"
                    " mend the file or set data.on_bad_text to skip or replace"
                )
            counts.bad_lines += 1
            counts.bad_bytes += len(_BAD.findall(text))
            if on_bad_text == "skip":
                continue
            text = _BAD.sub("\ufffd", text)
        yield text


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


_SPLITS: dict[str, Callable[[Iterable[str]], Iterator[str]]] = {
    "file": _whole_file,
    "blank_line": _blank_line_separated,
    "line": _each_line,
}


# --- TFDS ------------------------------------------------------------------------


def _tfds_builder(name: str, data_dir: str | None):
    """Returns the builder of a data set that is prepared in a readable format."""
    import tensorflow_datasets as tfds
    import tensorflow_datasets.text  # noqa: F401  registers glue, wikipedia, c4, …

    folder = os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR)
    refuse_foreign_classes(os.path.join(folder, re.split("[/:]", name)[0]))
    try:
        builder = tfds.builder(name, data_dir=folder)
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"tfds:{name} is unknown (data_dir {folder}): {reason}"
        ) from error
    command = (
        'python -c "import tensorflow_datasets as tfds, tensorflow_datasets.text;'
        f" tfds.builder('{name}', data_dir='{folder}',"
        " file_format='array_record').download_and_prepare()\""
    )
    if not builder.data_path.exists():
        raise InputError(f"tfds:{name} is not prepared in {folder}; run {command}")
    if builder.info.file_format.value != "array_record":
        raise InputError(
            f"tfds:{name} is prepared in {folder} as {builder.info.file_format.value},"
            f" which has no random access; move it away and run {command}"
        )
    if "train" not in builder.info.splits:
        raise InputError(
            f"tfds:{name} has no train split, only {', '.join(builder.info.splits)}"
        )
    return builder


def _text_feature(builder, name: str) -> str:
    import tensorflow_datasets as tfds

    found = [
        key
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Text)
    ]
    if "text" in found:
        return "text"
    if len(found) == 1:
        return found[0]
    raise InputError(
        f"tfds:{name} needs a feature named text or exactly one text feature,"
        f" it has {', '.join(found) or 'none'}"
    )


def _tfds_documents(name, data_dir, on_bad_text, counts) -> Iterator[str]:
    builder = _tfds_builder(name, data_dir)
    feature = _text_feature(builder, name)
    examples = builder.as_data_source(split="train")
    for number in range(len(examples)):
        try:
            text = examples[number][feature]  # None from a shard cut short
            data = text if isinstance(text, bytes) else text.encode()
        except Exception as error:  # ArrayRecord and TFDS raise nearly anything
            reason = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise InputError(
                f"tfds:{name} record {number} in {_shard(builder, number)} cannot be"
                f" read: {reason}"
            ) from error
        lines = data.split(b"\n")
        where = f"tfds:{name} record {number}"
        ended = [line + b"\n" for line in lines[:-1]] + lines[-1:]
        yield "\n".join(_clean_lines(ended, where, on_bad_text, counts))


def _shard(builder, number: int) -> str:
    """Returns the file of the train split that holds a record."""
    split = builder.info.splits["train"]
    ends = list(itertools.accumulate(split.shard_lengths))
    return str(split.filepaths[bisect.bisect_right(ends, number)])
