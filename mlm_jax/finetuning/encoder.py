"""The encoder of a trained run under a new head: all of its weights, or an error."""

import jax
import numpy as np
from flax import traverse_util

from mlm_jax.errors import InputError
from mlm_jax.model.task_head import TaskModel

ENCODER = "encoder"  # of the parameters of both models


def make_model(trained, problem, *, pooling, dropout):
    """Returns the TaskModel of a problem on the encoder of a `trained.Trained`."""
    encoder = trained.model.encoder
    encoder = encoder.clone(dropout=dropout, attention_dropout=dropout)
    return TaskModel(encoder, problem.num_outputs, problem.per_token, pooling)


def with_encoder(params, trained):
    """Returns `params` with the encoder of a run in the place of theirs, bit for bit.

    Raises InputError, naming the first one, if a parameter is missing, not expected, or
    of another shape.
    """
    loaded = jax.device_get(trained.params.get(ENCODER, {}))
    wanted, found = _named(params[ENCODER]), _named(loaded)
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in wanted]
    wrong += [
        f"{name} is {np.shape(found[name])} and would be {np.shape(wanted[name])}"
        for name in wanted.keys() & found.keys()
        if np.shape(found[name]) != np.shape(wanted[name])
    ]
    if wrong:
        raise InputError(
            f"the encoder cannot be loaded: {sorted(wrong)[0]}; {len(wrong)} of "
            f"{len(wanted.keys() | found.keys())} parameters do not fit."
        )
    return params | {ENCODER: loaded}


def describe(params, trained, weights):
    """Returns a line about what is loaded and what is new."""
    encoder, rest = _named(params[ENCODER]), _named(params)
    size = sum(leaf.size for leaf in encoder.values())
    head = sum(leaf.size for leaf in rest.values()) - size
    what = "all new" if weights == "random" else f"all those of step {trained.step:,}"
    return (
        f"encoder: {len(encoder)} arrays, {size:,} parameters, {what}; head: "
        f"{len(rest) - len(encoder)} arrays, {head:,} parameters, new"
    )


def _named(params):
    return traverse_util.flatten_dict(params, sep="/")
