"""Records of a task from where its split is named: JSONL, TSV, or a TFDS data set."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping

from mlm_jax.data import data_sets
from mlm_jax.errors import InputError

Record = tuple[str, Mapping]  # where it is, for error texts, and {column: value}
_SPLIT = re.compile(r"tfds:(?P<name>[^#]+)#(?P<split>.+)")


def records(name: str, field: str, data_dir: str | None) -> list[Record]:
    """Returns the records of a split, in order.

    Args:
      name: `FILE.jsonl`, an object a line; `FILE.tsv`, columns named in its first line,
        no quotes; or `tfds:NAME[/CONFIG][:VERSION]#SPLIT`.
      field: of the config, for error texts.
      data_dir: where TFDS keeps its data sets; None is its own default.

    Raises:
      InputError: for a file or data set that cannot be read, or has no records.
    """
    if name.startswith("tfds:"):
        match = _SPLIT.fullmatch(name)
        if not match:
            raise InputError(
                f"{field}={name!r} is not of the form "
                "tfds:NAME[/CONFIG][:VERSION]#SPLIT."
            )
        found: list[Record] = [
            *data_sets.examples(match["name"], match["split"], data_dir)
        ]
    else:
        path = pathlib.Path(name)
        readers = {".jsonl": _json_lines, ".tsv": _tsv}
        if path.suffix not in readers:
            raise InputError(
                f"{field}={name!r} is none of *.jsonl, *.tsv and "
                "tfds:NAME[/CONFIG][:VERSION]#SPLIT."
            )
        found = list(readers[path.suffix](path, _lines(path, field)))
    if not found:
        raise InputError(f"{field}={name} has no examples.")
    return found


def _lines(path: pathlib.Path, field: str) -> list[str]:
    try:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode()
    except OSError as error:
        raise InputError(f"{field}={path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} line {line} is not UTF-8.") from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def _json_lines(path: pathlib.Path, lines: list[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise InputError(f"{where} is no JSON object.")
        yield where, record


def _tsv(path: pathlib.Path, lines: list[str]) -> Iterator[Record]:
    names = lines[0].split("\t")
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        values = line.split("\t")
        if len(values) != len(names):
            raise InputError(
                f"{path} line {number} has {len(values)} columns; its first line names "
                f"{len(names)}."
            )
        yield f"{path} line {number}", dict(zip(names, values, strict=True))
