"""What the pieces of a vocabulary stand for in text: their bytes, and their place in a
word. Told by the pieces' own notation, which is that of the tokenizer's model."""

import json
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

# Byte-level pieces write byte b as chr(256 + b) up to the space (Radford et al. 2019).
BYTE_LEVEL_SPACES = frozenset(chr(256 + b) for b in (*range(9, 14), 32))
METASPACE = "▁"


def byte_lengths(pieces: Sequence[str], form: Mapping) -> np.ndarray:
    """Returns int64[V]: the UTF-8 bytes of each piece's text, without white space.

    Some vocabularies have the space before a word in its piece, others have it nowhere:
    without it the same text has as many bytes under each. They are the bytes of text as
    the tokenizer normalises it.

    Args:
      pieces: the entries, by id.
      form: the saved form of the tokenizer, a `tokenizer.json`.
    """
    if _is_byte_level(form):
        return np.array([sum(c not in BYTE_LEVEL_SPACES for c in p) for p in pieces])
    prefix = _prefix(form)
    texts = (piece.removeprefix(prefix).replace(METASPACE, " ") for piece in pieces)
    return np.array([len("".join(text.split()).encode()) for text in texts])


def continues_word(pieces: Sequence[str], form: Mapping) -> np.ndarray:
    """Returns bool[V]: the pieces that stand in a word after its first one.

    Of vocabularies that mark the start of a word, with a space, those without the mark
    that are no punctuation.
    """
    if prefix := _prefix(form):
        return np.array([piece.startswith(prefix) for piece in pieces])
    starts = {METASPACE, *BYTE_LEVEL_SPACES}
    return np.array([_is_letter(p[:1]) and p[:1] not in starts for p in pieces])


def _prefix(form: Mapping) -> str:
    return form["model"].get("continuing_subword_prefix") or ""


def _is_byte_level(form: Mapping) -> bool:
    return '"ByteLevel"' in json.dumps(form["decoder"])


def _is_letter(character: str) -> bool:
    """Whatever is no punctuation, symbol or space."""
    return bool(character) and unicodedata.category(character)[0] not in "PSZ"
