"""The state of a training run: arrays only, in one layout whatever the devices."""

import flax.struct
import jax
import jax.numpy as jnp

from mlm_jax import keys
from mlm_jax.keys import Purpose


@flax.struct.dataclass
class TrainState:
    """`step` counts finished updates. `key` never changes: each use folds in what it is
    for. `hparams` are the numbers that may differ between runs of one compilation."""

    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array
    hparams: dict


def init_state(key, hparams, *, model, optimizer, row_length):
    """Returns the state before the first update."""
    row = jnp.zeros((1, row_length), jnp.int32)
    init_key = keys.purpose_key(key, Purpose.INIT)
    params = model.init(init_key, row, row, row, row[:, :1])["params"]
    opt_state = optimizer(hparams["peak_learning_rate"], hparams).init(params)
    hparams = jax.tree.map(jnp.asarray, hparams)
    return TrainState(jnp.int32(0), params, opt_state, key, hparams)
