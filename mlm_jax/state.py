"""The state of a training run: arrays only, in one layout whatever the devices."""

import math

import flax.struct
import jax
import jax.numpy as jnp

from mlm_jax import keys, spikes
from mlm_jax.keys import Purpose


@flax.struct.dataclass
class TrainState:
    """`step` counts finished updates. `token_loss` float32[V] is a running mean of each
    token's loss, moved only where a policy hides tokens by it. `recent` is what
    `spikes` remembers, {} where a config has no `spike_sigmas`. `key` never changes:
    each use folds in what it is for. `hparams` are the numbers that may differ between
    runs of one compilation; they are the config's, and not saved."""

    step: jax.Array
    params: dict
    opt_state: tuple
    token_loss: jax.Array
    recent: dict
    key: jax.Array
    hparams: dict


def init_state(key, hparams, *, model, optimizer, row_length):
    """Returns the state before the first update."""
    params = init_params(key, model, row_length)
    return first_state(key, hparams, params, optimizer)


def init_params(key, model, row_length):
    row = jnp.zeros((1, row_length), jnp.int32)
    init_key = keys.purpose_key(key, Purpose.INIT)
    # Nothing is gained by compiling each layer's draws apart: 5 s for a BERT-base.
    model = model.clone(encoder=model.encoder.clone(scan_unroll=1))
    if not model.head:
        return {"encoder": model.encoder.init(init_key, row, row, row)["params"]}
    return model.init(init_key, row, row, row, row[:, :1])["params"]


def first_state(key, hparams, params, optimizer):
    """Returns the state of these parameters before the first update."""
    opt_state = optimizer(hparams["peak_learning_rate"], hparams).init(params)
    hparams = jax.tree.map(jnp.asarray, hparams)
    # A model that knows nothing loses ln V on every token.
    num_rows = len(params["encoder"]["embed"]["embedding"])
    token_loss = jnp.full(num_rows, math.log(num_rows), jnp.float32)
    recent = spikes.nothing_seen() if "spike_sigmas" in hparams else {}
    return TrainState(jnp.int32(0), params, opt_state, token_loss, recent, key, hparams)
