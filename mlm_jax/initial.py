"""The weights that a run begins with, where they are those of another run.

`init_from` names the other run's workdir. Everything of its newest checkpoint's
parameters is taken, or nothing is: a field of the `model` section that changes what
they compute must be the same, and so must every parameter's name and shape. Which
checkpoint it was stays in `initial.json`; from its own first checkpoint on, a run needs
the other one no more.
"""

import json

import jax
from flax import traverse_util

from mlm_jax import checkpoint, config, processes, workdir
from mlm_jax.errors import InputError
from mlm_jax.files import write_text

INITIAL = "initial.json"
# These change no number that the parameters stand for; the shapes show the last two.
FREE = {
    *("dropout", "attention_dropout", "scan_unroll", "remat", "dtype"),
    *("max_length", "embed_norm"),
}


def load(c, directory, abstract_params):
    """Returns the parameters of `c.init_from`, placed like `abstract_params`.

    Raises InputError, naming field or parameter, if they are not those of the config's
    model, or not those that the run in `directory` has begun with before;
    CheckpointError if there are none.
    """
    _check_model(c, config.load(c.init_from))
    step, state = checkpoint.restore_latest(c.init_from)
    found = traverse_util.flatten_dict(state["params"], sep="/")
    expected = traverse_util.flatten_dict(abstract_params, sep="/")
    _check_params(c.init_from, found, expected)
    _record(c, directory, step, state["params"])
    placed = {
        path: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, found[path].__getitem__
        )
        for path, leaf in expected.items()
    }
    print(f"begins with all {len(placed)} parameters of {c.init_from}, step {step:,}")
    return traverse_util.unflatten_dict(placed, sep="/")


def _check_model(c, other):
    for name in sorted(set(c.model) - FREE):
        if c.model[name] != other.model[name]:
            raise InputError(
                f"config.model.{name} = {c.model[name]!r}; config.init_from = "
                f"{c.init_from} has {other.model[name]!r}. Its whole model section is "
                f"taken by --config=configs/from_run.py:{c.init_from}"
            )


def _check_params(where, found, expected):
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise InputError(
            f"config.init_from = {where} has {len(found)} parameters, this model "
            f"{len(expected)}; {len(missing)} missing: {', '.join(missing[:3])}; "
            f"{len(unexpected)} unexpected: {', '.join(unexpected[:3])}."
        )
    for path, leaf in expected.items():
        if found[path].shape != leaf.shape:
            raise InputError(
                f"config.init_from = {where}: {path} is {found[path].shape}, and would "
                f"be {leaf.shape}."
            )


def _record(c, directory, step, params):
    """Keeps what the run begins with, or holds it to what it began with."""
    facts = {"from": c.init_from, "step": step}
    facts["digest"] = checkpoint.digest({"params": params})
    path = directory / INITIAL
    if path.exists() and workdir.has_begun(directory):
        before = json.loads(path.read_bytes())
        if before["digest"] != facts["digest"]:
            raise InputError(
                f"{directory} began with step {before['step']:,} of {c.init_from}, "
                f"which is at step {step:,} now and no longer what it was; use another "
                "--workdir."
            )
    elif processes.is_first():
        write_text(path, json.dumps(facts, indent=2) + "\n")
