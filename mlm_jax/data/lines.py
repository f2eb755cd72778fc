"""Bytes to clean lines of text, whatever they came from.

Lines end at `\\n` and nowhere else, whatever Unicode says; a byte order mark, `\\r\\n`
and bytes that are not UTF-8 never get past this file.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator

from mlm_jax.errors import InputError

# Bytes that are not UTF-8 decode to these (PEP 383); NUL is no text either.
_BAD = re.compile("[\x00\udc80-\udcff]")
_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass
class TextCounts:
    """What a pass over a source met."""

    documents: int = 0  # yielded
    empty: int = 0  # nothing but white space, not yielded
    characters: int = 0
    bad_lines: int = 0  # lines skipped or mended
    bad_bytes: int = 0  # the offending bytes in them


def clean_lines(
    lines: Iterable[bytes],
    *,
    offset: int,
    where: Callable[[int, int], str],
    on_bad_text: str,
    counts: TextCounts,
) -> Iterator[str]:
    """Yields lines without their end.

    Args:
      lines: split after `\\n` only.
      offset: of the first of them in its file; a byte order mark stands at 0.
      where: names a place for people, given lines read before it and its byte offset.
      on_bad_text: `stop`; `skip` the line; or `replace` the bytes by U+FFFD.
      counts: of lines and bytes skipped or mended.

    Raises:
      InputError: under `stop`, for a NUL or bytes that are not UTF-8.
    """
    for number, line in enumerate(lines):
        start, offset = offset, offset + len(line)
        if start == 0 and line.startswith(_MARK):
            line, start = line.removeprefix(_MARK), len(_MARK)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        text = line.decode("utf-8", "surrogateescape")
        bad = _BAD.search(text)
        if bad:
            if on_bad_text == "stop":
                before = text[: bad.start()].encode("utf-8", "surrogateescape")
                what = "a NUL byte" if bad[0] == "\0" else "bytes that are not UTF-8"
                raise InputError(
                    f"{where(number, start + len(before))}: {what};"
                    " mend the file or set data.on_bad_text to skip or replace"
                )
            counts.bad_lines += 1
            counts.bad_bytes += len(_BAD.findall(text))
            if on_bad_text == "skip":
                continue
            text = _BAD.sub("\ufffd", text)
        yield text
