"""Checkpoints of a run, through Orbax. The only module that knows it."""

import hashlib
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from mlm_jax.errors import CheckpointError


class Checkpoints:
    """The directory `workdir/checkpoints/STEP/`, one complete state in each.

    A save is atomic: a step exists once its directory has been renamed into place. What
    a killed save left behind is removed at the next start.
    """

    def __init__(self, workdir, *, keep):
        self._manager = ocp.CheckpointManager(
            pathlib.Path(workdir).absolute() / "checkpoints",
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.LatestN(keep),
                # A donated buffer may be overwritten while a background save reads it.
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._manager.close()

    def latest_step(self):
        """Returns the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step, state):
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def restore(self, step, abstract_state):
        """Restores into the shapes, dtypes and shardings of `abstract_state`."""
        return self._manager.restore(
            step, args=ocp.args.StandardRestore(abstract_state)
        )


def restore_latest(workdir, abstract_state=None):
    """Returns (step, state) of the newest checkpoint, the state as nested dicts of
    arrays. Raises CheckpointError where there is none.

    Changes nothing on disk, so it may be used beside a run that goes on.
    """
    directory = pathlib.Path(workdir).absolute() / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(f"{workdir} holds no checkpoint yet.")
    with ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(create=False)
    ) as manager:
        step = manager.latest_step()
        if step is None:
            raise CheckpointError(f"{directory} holds no complete checkpoint.")
        return step, manager.restore(
            step, args=ocp.args.StandardRestore(abstract_state)
        )


def digest(state):
    """Returns sha256 over path, dtype, shape and bytes of every leaf, in path order."""
    sha256 = hashlib.sha256()
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    for name in sorted(leaves):
        leaf = leaves[name]
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        sha256.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()
