"""How likely a token is to be hidden, against the others of its row.

Each function returns float32[V], raised to the power `weight_power` by the caller.
"""

import jax.numpy as jnp
import numpy as np


def uniform(counts_V, hparams):
    """Every token alike."""
    del counts_V, hparams
    return None


def inverse_frequency(counts_V, hparams):
    """Rare tokens more often: 1 / (1 + occurrences in the training rows)."""
    del hparams
    return jnp.asarray(1 / (1 + counts_V.astype(np.float64)), jnp.float32)


def running_loss(counts_V, hparams):
    """What the model finds hard more often: a running mean of each token's loss, part
    of the training state."""
    del counts_V
    return hparams["token_loss"]


WEIGHTS = {
    "uniform": uniform,
    "inverse_frequency": inverse_frequency,
    "running_loss": running_loss,
}


def updated(token_loss_V, loss_sums_V, counts_V, decay):
    """Returns the running means after an update in which token v had `counts_V[v]`
    predictions with losses summing to `loss_sums_V[v]`; without any it stays."""
    mean_V = loss_sums_V / jnp.maximum(counts_V, 1)
    moved_V = decay * token_loss_V + (1 - decay) * mean_V
    return jnp.where(counts_V > 0, moved_V, token_loss_V)
