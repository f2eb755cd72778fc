"""A small head on the encoder: one answer a text, or one a token."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlm_jax.model.encoder import Encoder
from mlm_jax.model.layers import Dense, dropout
from mlm_jax.model.pooling import POOLINGS


class TaskModel(nn.Module):
    """The encoder of a masked language model, its head replaced.

    For each token, or for a text: pooled, then BERT's dense layer with tanh. Pooling
    takes the vector of [CLS] (`cls`), or the mean over the row's tokens (`mean`).
    Returns float32[B, L, C] or [B, C].
    """

    encoder: Encoder
    num_outputs: int
    per_token: bool
    pooling: str

    @nn.compact
    def __call__(self, tokens_BxL, segment_BxL, position_BxL, keys_B=None):
        dtype, rate = self.encoder.dtype, self.encoder.dropout
        x_BxLxD = self.encoder(tokens_BxL, segment_BxL, position_BxL, keys_B)
        width = x_BxLxD.shape[-1]
        if self.per_token:
            x_NxD = x_BxLxD.reshape(-1, width)
        else:
            pooled_BxD = POOLINGS[self.pooling](x_BxLxD, segment_BxL)
            x_NxD = jnp.tanh(Dense(width, dtype, name="pooler")(pooled_BxD))
        if keys_B is not None:  # not those that the encoder splits
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys_B)
        x_NxD = dropout(keys_B, x_NxD, rate)
        y_NxC = Dense(self.num_outputs, jnp.dtype("float32"), name="output")(x_NxD)
        return y_NxC.reshape(*x_BxLxD.shape[:-1], -1) if self.per_token else y_NxC
