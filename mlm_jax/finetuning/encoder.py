"""The encoder of a trained run under a new head: all of its weights, or an error."""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from mlm_jax import checkpoint, config, program
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.model.task_head import TaskModel

ENCODER = "encoder"  # of the parameters of both models


class Trained(NamedTuple):
    """A run to start from: its config, tokenizer, step and parameters on the host."""

    c: Any
    tokenizer: Tokenizer
    step: int
    params: dict


def load(workdir):
    """Returns the `Trained` of a run. Raises InputError or CheckpointError if there is
    none."""
    c = config.load(workdir)
    tokenizer = Tokenizer.load(pathlib.Path(workdir) / "tokenizer.json")
    step, state = checkpoint.restore_latest(workdir)
    return Trained(c, tokenizer, step, state["params"])


def make_model(trained, problem, *, pooling, dropout):
    """Returns the TaskModel of a problem on the encoder of a run."""
    platform = jax.default_backend()
    masked = program.model_of(trained.c, trained.tokenizer.vocab_size, platform)
    encoder = masked.encoder.clone(dropout=dropout, attention_dropout=dropout)
    return TaskModel(encoder, problem.num_outputs, problem.per_token, pooling)


def with_encoder(params, trained):
    """Returns `params` with the encoder of a run in the place of their own, bit for bit.

    Raises InputError, naming the first one, if a parameter is missing, not expected, or
    of another shape.
    """
    wanted, found = _named(params[ENCODER]), _named(trained.params.get(ENCODER, {}))
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
    return params | {ENCODER: trained.params[ENCODER]}


def describe(params, trained, weights):
    """Returns a line about what is loaded and what is new."""
    encoder, rest = _named(params[ENCODER]), _named(params)
    size = sum(leaf.size for leaf in encoder.values())
    head = sum(leaf.size for leaf in rest.values()) - size
    if weights == "random":
        return f"encoder: {len(encoder)} arrays, {size:,} parameters, all random (weights = random); head: {head:,} new"
    return (
        f"encoder: step {trained.step:,}, {len(encoder)} arrays, {size:,} parameters, "
        f"all loaded; head: {len(rest) - len(encoder)} arrays, {head:,} new"
    )


def _named(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
