"""A run's directory: held by one process, and true to the run that it began with.

Beside the config and the tokenizer it has `environment.json`: the fingerprint of the
data, and for each start of the run, from which step on, the git revision, versions and
devices. Imports no jax.
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys

from mlm_jax import config
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError, WorkdirBusyError
from mlm_jax.files import write_text

ENVIRONMENT = "environment.json"
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
    *("tokenizers", "tensorflow-datasets", "array-record"),
)
ROOT = pathlib.Path(__file__).parents[1]


@contextlib.contextmanager
def held(workdir):
    """Makes the directory and holds it for this process.

    The system lets go of it when the process dies, whatever it dies of. Raises
    InputError if it cannot be written, WorkdirBusyError, naming the owner, if another
    process holds it.
    """
    path = pathlib.Path(workdir) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _lock(path)
    except (OSError, ValueError) as error:  # ValueError: no path can have a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--workdir={workdir} cannot be written: {reason}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        file.close()


def _lock(path):
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read() or "another process"
            file.close()
            raise WorkdirBusyError(
                f"--workdir={path.parent} is held by {owner}; one process trains in a "
                "directory at a time."
            ) from error
        # Its last owner may have removed it between the two calls.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    file.truncate(0)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
    file.flush()
    return file


def check_config(workdir, c, allowed):
    """Returns {field: (old, new)} of what differs from the run in the directory.

    Raises InputError for what is not `allowed` to, and if there are checkpoints of no
    config.
    """
    if not has_begun(workdir):
        if any((workdir / "checkpoints").glob("[0-9]*")):
            raise InputError(
                f"{workdir} has checkpoints, and no config.json that says of what run; "
                "put it back, or use another --workdir."
            )
        return {}
    old = config.flatten(config.load(workdir))
    return config.check_unchanged(old, config.flatten(c), allowed)


def check_data(workdir, store, allowed):
    """The same for the vocabulary and the rows."""
    if not has_begun(workdir):
        return {}
    new = _facts(store)
    old = {"tokenizer.digest": Tokenizer.load(workdir / "tokenizer.json").digest}
    if environment := read_environment(workdir):  # a damaged one may be removed
        old["data.fingerprint"] = environment["data.fingerprint"]
    return config.check_unchanged(old, {name: new[name] for name in old}, allowed)


def has_begun(workdir):
    """`config.json` is the last thing that is written before the first step."""
    return (workdir / "config.json").exists()


def record(workdir, store, step, devices, changes):
    """Writes `tokenizer.json`, and appends to `environment.json` what makes the steps
    from `step` on, if that has changed. Prints what has."""
    store.tokenizer.save(workdir / "tokenizer.json")
    starts = read_environment(workdir).get("starts", []) if step else []
    now = _surroundings() | {"devices": devices}
    if changes:
        now["changed"] = {name: list(values) for name, values in changes.items()}
        texts = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changes.items()]
        print(f"goes on from step {step:,} with {'; '.join(texts)}")
    last = dict(starts[-1]) if starts else {}
    last_step = last.pop("step", None)
    if last != now:
        starts.append({"step": step} | now)
        write_text(
            workdir / ENVIRONMENT,
            json.dumps(_facts(store) | {"starts": starts}, indent=2) + "\n",
        )
    changed = [
        f"{name} {last['packages'].get(name)} -> {version}"
        for name, version in now["packages"].items()
        if last and last["packages"].get(name) != version
    ]
    if changed:
        print(
            f"warning: other versions than from step {last_step:,} on, so the numbers "
            f"may differ from those of one run: {', '.join(changed)}",
            file=sys.stderr,
        )


def _facts(store):
    return {
        "tokenizer.digest": store.tokenizer.digest,
        "data.fingerprint": store.fingerprint,
    }


def read_environment(workdir):
    """Returns what `record` wrote, or {} before. Raises InputError if it is damaged."""
    path = workdir / ENVIRONMENT
    if not path.exists():
        return {}
    try:
        environment = json.loads(path.read_bytes())
        environment["data.fingerprint"]
        for start in environment["starts"]:
            start["step"], start["packages"].items()
        return environment
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error!r}); remove it.") from error


def _surroundings():
    return {
        "git": _git_revision(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision():
    """Returns the commit of this code, with `-dirty` if it was changed, or None."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
