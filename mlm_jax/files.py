"""Files that are there whole or not at all, and directories named by what made them."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping


def finite(value):
    """Returns `value` with None for each NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(value) -> str:
    """Returns JSON for people to read, the same whatever the order of names."""
    return json.dumps(finite(value), indent=2, sort_keys=True) + "\n"


def name_of(settings: Mapping) -> str:
    """Returns a short hex name that changes with any of `settings`."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes beside `path` and renames, so that a kill leaves no half of a file.

    One process at a time: what a killed one left beside it, the next one overwrites.
    """
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, data: bytes) -> None:
    """The same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # it would keep a full disk full
        raise


def sync_folder(folder: pathlib.Path) -> None:
    """Puts the names in a directory on the disk: a file's own sync need not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Holds `path` for one process; the system lets go of it when that is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
