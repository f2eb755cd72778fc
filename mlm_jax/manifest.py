"""A list of a directory's files with sizes and digests, by which damage is noticed.

Orbax restores an array some of whose bytes have changed without a word.
"""

import hashlib
import json
import os
import pathlib

from mlm_jax.errors import DamageError
from mlm_jax.files import sync_folder, write_text

NAME = "manifest.json"


def write(folder, facts):
    """Lists the files of `folder`, next to `facts`, a dict of what else to remember.

    The list is there once every file that it names is on the disk, and it is there
    itself on return.
    """
    files = {}
    paths = sorted(folder.rglob("*"))
    for path in (path for path in paths if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": sha256}
    facts = facts | {"files": files}
    facts["sha256"] = _own_digest(facts)
    for path in (path for path in paths if path.is_dir()):
        sync_folder(path)
    write_text(folder / NAME, json.dumps(facts, indent=1) + "\n")
    sync_folder(folder)


def read(folder):
    """Returns the facts, and the list as `files`. Raises DamageError without them."""
    try:
        facts = json.loads((folder / NAME).read_bytes())
        if facts.pop("sha256") != _own_digest(facts):
            raise DamageError(f"{NAME} has changed: its sha256 is another one")
        for name, listed in facts["files"].items():
            listed["size"], listed["sha256"]
            if ".." in pathlib.PurePosixPath(name).parts or name.startswith("/"):
                raise DamageError(f"{NAME} names a file elsewhere: {name}")
    except OSError as error:
        raise DamageError(f"{NAME}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{NAME} is not a manifest: {error!r}") from error
    return facts


def _own_digest(facts):
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def verify(folder):
    """Returns `read(folder)`. Raises DamageError, naming the file, if one is missing
    or not what it was; files that are not listed do not matter."""
    facts = read(folder)
    for name, listed in facts["files"].items():
        path = folder / name
        try:
            if path.is_symlink() or not path.is_file():
                raise DamageError(f"{name} is missing")
            size = path.stat().st_size
            if size != listed["size"]:
                raise DamageError(f"{name} has {size} bytes, not {listed['size']}")
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamageError(f"{name}: {error.strerror}") from error
        if sha256 != listed["sha256"]:
            raise DamageError(f"{name} has changed: its sha256 is another one")
    return facts
