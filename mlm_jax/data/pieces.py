"""What a source is cut into, to be read apart: pieces, and parts made of them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# How a corpus is cut decides where rows start anew, so that these belong to the format
# of the row store (`rows.FORMAT`). Parts of a larger corpus are larger: a store of
# very many files is slow to open.
PART_BYTES = 1 << 22
MAX_PARTS = 4096


class Piece(NamedTuple):
    """A run of consecutive documents."""

    name: str  # of a file or a data set
    start: int  # byte or record
    stop: int
    size: int  # about how many bytes


Part = tuple[Piece, ...]


def parts(pieces: Iterable[Piece], size: int) -> Iterator[Part]:
    """Yields consecutive pieces together, up to `size` bytes or a larger piece."""
    part: list[Piece] = []
    room = size
    for piece in pieces:
        if part and piece.size > room:
            yield tuple(part)
            part, room = [], size
        part.append(piece)
        room -= piece.size
    if part:
        yield tuple(part)


def part_size(num_bytes: int) -> int:
    """Returns the size of the parts of a corpus."""
    return max(PART_BYTES, -(-num_bytes // MAX_PARTS))
