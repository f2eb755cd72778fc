"""Checkpoints of a run, through Orbax. The only module that knows it.

`workdir/checkpoints/STEP/` holds `state/`, Orbax's files, and `manifest.json`, by which
they are verified. A step gets its name when all of it is on the disk, and loses it
before any of it is removed, so a kill leaves whole checkpoints and `STEP.saving` or
`STEP.removing`. Arrays are saved as the host sees them: any number of devices restores
what any other has saved.
"""

import hashlib
import math
import pathlib
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import orbax.checkpoint as ocp

from mlm_jax import manifest
from mlm_jax.errors import CheckpointError, DamageError, InputError, NonFiniteError
from mlm_jax.files import sync_folder

# What `check` prints a digest of, and two runs are compared by.
COMPARED = ("params", "opt_state", "step")
# Beyond the bytes of the arrays: metadata, and what compression may add.
MARGIN = 1 << 20
# A small file that claims to be a large state would fill the memory with zeros. A fresh
# state has three times the bytes of its files: Adam's two thirds of it are zeros.
MAX_EXPANSION = 8
SMALL = 50 << 20


class Checkpoints:
    """Writes the checkpoints of a run, and restores the newest one that is whole.

    Of the checkpoints up to the newest it keeps the last `keep`, every one whose step
    is a multiple of `keep_every` (0 is none), and with `keep_best` the one with the
    lowest held-out loss among those that were evaluated.

    A state is copied to the host at once and written by a thread meanwhile. An error
    there is raised by the next call, or at the end.
    """

    def __init__(self, workdir, *, keep, keep_best=False, keep_every=0):
        self._folder = _folder(workdir)
        self._keep, self._keep_best, self._keep_every = keep, keep_best, keep_every
        self._damaged: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None
        if jax.process_index() == 0:
            self._clean()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self._thread.shutdown(wait=True)
        if error is None:
            self.wait()

    def restore(self, abstract_state):
        """Returns (step, state) of the newest whole checkpoint, in the shapes, dtypes
        and shardings of `abstract_state`; (None, None) before the first one.

        Damaged ones are named on stderr and left alone until the run has reached their
        step again. Raises CheckpointError if there are some and none is whole.
        """
        self.wait()
        found = steps(self._folder)
        if not found:
            return None, None
        step, state = _newest_whole(self._folder, abstract_state)
        self._damaged = {damaged for damaged in found if damaged > step}
        return step, state

    def save(self, step, state, *, eval_loss=None):
        """Saves the state of a step, replacing a damaged one.

        Raises InputError, with the bytes needed and free, if there is no room or the
        directory cannot be written, and NonFiniteError instead of saving such a state.
        Older checkpoints stay. Of several processes the first one writes.
        """
        self.wait()
        if jax.process_index() > 0:
            return
        state = jax.tree.map(_on_host, state)
        self._pending = self._thread.submit(self._write, step, state, eval_loss)

    def check(self):
        """Raises what the last save failed with, if it has; returns at once."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self):
        """Returns when the last save is on the disk; raises what it failed with."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, step, state, eval_loss):
        _check_finite(step, state)
        final = self._folder / str(step)
        saving, removing = _saving(final), _removing(final)
        try:
            self._check_room(step, state)
            _remove(saving)
            _checkpointer().save(saving / "state", args=ocp.args.StandardSave(state))
            facts = {
                "step": step,
                "arrays": _arrays(state),
                "digest": digest({name: getattr(state, name) for name in COMPARED}),
                "eval_loss": eval_loss if _is_number(eval_loss) else None,
            }
            manifest.write(saving, facts)
            if final.exists():
                final.rename(removing)
            saving.rename(final)
            sync_folder(self._folder)
            _remove(removing)
            self._damaged.discard(step)
            self._prune(step)
        # TensorStore speaks of a full disk in a ValueError, or whatever it likes.
        except (OSError, ValueError, RuntimeError) as error:
            _remove(saving)
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the checkpoint of step {step:,} cannot be saved in {self._folder}: "
                f"{_first_line(error)}; {_advice(self._folder)}"
            ) from error

    def _check_room(self, step, state):
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + MARGIN
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise InputError(
                f"the checkpoint of step {step:,} needs {needed:,} bytes, and "
                f"{self._folder} has {free:,} free; {_advice(self._folder)}"
            )

    def _prune(self, newest):
        """Removes what is not kept. What lies after `newest` is damaged, and waits."""
        found = [step for step in steps(self._folder) if step <= newest]
        whole = [step for step in found if step not in self._damaged]
        kept = set(whole[: self._keep])
        if self._keep_every:
            kept.update(step for step in whole if step % self._keep_every == 0)
        if self._keep_best:
            losses = {step: _eval_loss(self._folder / str(step)) for step in whole}
            best = min(losses, key=lambda step: (losses[step], step))
            if losses[best] < math.inf:
                kept.add(best)
        for step in found:
            if step not in kept:
                path = self._folder / str(step)
                path.rename(_removing(path))
                _remove(_removing(path))

    def _clean(self):
        """Removes what a killed save, ours or Orbax's, has left."""
        left = [
            path
            for path in (self._folder.iterdir() if self._folder.is_dir() else ())
            if re.fullmatch(r"[0-9]+\.(saving|removing|.*tmp.*)", path.name)
        ]
        for path in left:
            _remove(path)
        if left:
            names = ", ".join(sorted(path.name for path in left))
            _warn(f"removed what a stopped save left in {self._folder}: {names}")


def steps(folder):
    """Returns the steps in a directory of checkpoints, damaged or not, newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(n) for n in names if re.fullmatch("0|[1-9][0-9]*", n))[::-1]


def restore_latest(workdir):
    """Returns (step, state) of the newest whole checkpoint, the state as nested dicts
    of arrays on the host. Raises CheckpointError where there is none.

    Changes nothing on disk, so it may be used beside a run that goes on.
    """
    folder = _folder(workdir)
    if not steps(folder):
        raise CheckpointError(f"{workdir} holds no checkpoint yet.")
    return _newest_whole(folder, None)


def restore_step(workdir, step):
    """The same of one step. Raises DamageError if it is not what was saved."""
    folder = _folder(workdir)
    if step not in steps(folder):
        kept = ", ".join(f"{kept:,}" for kept in steps(folder)[::-1]) or "none"
        raise CheckpointError(
            f"{workdir} has no checkpoint of step {step:,}; there are: {kept}."
        )
    return step, load(folder / str(step))


def load(path, abstract_state=None):
    """Returns the state of one checkpoint, as nested dicts of arrays on the host, or
    like `abstract_state`.

    Raises DamageError if it is not what was saved, CheckpointError if it is and still
    does not fit `abstract_state`.
    """
    facts = manifest.verify(path)
    if facts.get("step") != int(path.name):
        raise DamageError(f"{manifest.NAME} is that of step {facts.get('step')}")
    abstract = jax.tree.map(_abstract_on_host, abstract_state)
    if abstract_state is not None:
        _check_arrays(path, facts.get("arrays", {}), _arrays(abstract))
    try:
        _check_expansion(path, facts["files"])
        state = _checkpointer().restore(
            path / "state", args=ocp.args.StandardRestore(abstract)
        )
        found = state if abstract_state is None else vars(state)
        found_digest = digest({name: found[name] for name in COMPARED})
    except DamageError:
        raise
    except Exception as error:  # Orbax and TensorStore raise nearly anything
        raise CheckpointError(
            f"{path} is as it was saved, and still cannot be restored: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error
    if found_digest != facts.get("digest"):
        raise DamageError("the arrays restored are not those saved: another digest")
    return jax.tree.map(_like, abstract_state, state) if abstract_state else state


def digest(state):
    """Returns sha256 over path, dtype, shape and bytes of every leaf, in path order."""
    sha256 = hashlib.sha256()
    for name, leaf in sorted(_named(state).items()):
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        sha256.update(f"{name} {array.dtype} {np.shape(leaf)}\n".encode())
        sha256.update(array.reshape(-1).view(np.uint8))
    return sha256.hexdigest()


def _newest_whole(folder, abstract_state):
    found, reasons = steps(folder), []
    for step in found:
        try:
            state = load(folder / str(step), abstract_state)
        except DamageError as error:
            reasons.append(f"step {step}: {error}")
            continue
        for reason in reasons:
            _warn(f"checkpoint is damaged and not used, {reason}")
        return step, state
    if steps(folder) != found:  # a run that goes on has replaced them meanwhile
        return _newest_whole(folder, abstract_state)
    raise CheckpointError(
        f"no checkpoint in {folder} can be used; {'; '.join(reasons)}. Nothing was "
        "changed; a new --workdir starts afresh."
    )


def _folder(workdir):
    return pathlib.Path(workdir).absolute() / "checkpoints"


def _saving(path):
    return path.with_name(f"{path.name}.saving")


def _removing(path):
    return path.with_name(f"{path.name}.removing")


def _checkpointer():
    """For this process alone: it shall not wait for others, which do not write."""
    here = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=str(here)
    )
    return ocp.Checkpointer(
        ocp.StandardCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
    )


def _is_key(leaf):
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_host(leaf):
    """A copy: the next step is given the device's buffer to overwrite, and on a CPU an
    array without a copy is that buffer."""
    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _abstract_on_host(leaf):
    """What Orbax restores as an array on the host. Keys are saved as their data."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _like(abstract_leaf, array):
    """Puts an array where the state has it; of several processes each puts its part."""
    placed = jax.make_array_from_callback(
        array.shape, abstract_leaf.sharding, array.__getitem__
    )
    return jax.random.wrap_key_data(placed) if _is_key(abstract_leaf) else placed


def _named(state):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _arrays(state):
    return {name: f"{x.dtype} {x.shape}" for name, x in _named(state).items()}


def _check_arrays(path, saved, wanted):
    different = [
        f"{name} is {saved.get(name)} and would be {wanted.get(name)}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{path} is as it was saved, but holds the state of another program: "
            f"{different[0]}; {len(different)} arrays differ."
        )


def _check_expansion(path, files):
    tree = _checkpointer().metadata(path / "state").item_metadata.tree
    claimed = sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
    size = sum(listed["size"] for listed in files.values())
    if claimed > MAX_EXPANSION * size + SMALL:
        raise DamageError(f"arrays of {claimed:,} bytes in files of {size:,}")


def _check_finite(step, state):
    for name, leaf in _named(state).items():
        if not np.isfinite(leaf).all():
            raise NonFiniteError(
                f"step {step:,}: {name} has values that are not finite, so it is not "
                "saved. The checkpoints before it are sound."
            )


def _eval_loss(path):
    try:
        loss = manifest.read(path).get("eval_loss")
    except DamageError:
        return math.inf
    return loss if _is_number(loss) else math.inf


def _is_number(value):
    return isinstance(value, float) and math.isfinite(value)


def _remove(path):
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _advice(folder):
    kept = steps(folder)
    stay = f"step {kept[0]:,} and what is before it stay" if kept else "none is saved"
    return f"{stay}. Once it can be saved, the same command goes on."


def _first_line(error):
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


def _warn(text):
    print(f"warning: {text}", file=sys.stderr)
