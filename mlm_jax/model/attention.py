"""Bidirectional attention within segments."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlm_jax.model.layers import dense


def segment_mask(segment_BxL):
    """Returns bool[B, 1, L, L]: who may look at whom.

    Padding (segment 0) sees padding, so no softmax is ever over nothing.
    """
    return (segment_BxL[:, :, None] == segment_BxL[:, None, :])[:, None]


class SelfAttention(nn.Module):
    num_heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_NxD, mask_Bx1xLxL):
        width = x_NxD.shape[-1]
        length = mask_Bx1xLxL.shape[-1]

        def heads(name):
            y_NxD = dense(width, name, self.dtype)(x_NxD)
            return y_NxD.reshape(-1, length, self.num_heads, width // self.num_heads)

        y_BxLxHxK = jax.nn.dot_product_attention(
            heads("query"), heads("key"), heads("value"), mask=mask_Bx1xLxL
        )
        return dense(width, "out", self.dtype)(y_BxLxHxK.reshape(-1, width))
