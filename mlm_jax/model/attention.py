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


def rotation(position_BxL, head_size):
    """Returns (cos, sin), float32[B, L, 1, K/2], of how far each pair of a head's units
    turns at each position (Su et al. 2021)."""
    half = head_size // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = position_BxL[:, :, None, None] * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BxLxHxK, cos, sin):
    """Turns the pairs (k, k + K/2), so that a product of query and key depends on the
    distance of their positions."""
    x1, x2 = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BxLxHxK.dtype)


class SelfAttention(nn.Module):
    """Attention of `num_heads` heads; no rotation if `cos_sin` is None."""

    num_heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_NxD, mask_Bx1xLxL, cos_sin):
        width = x_NxD.shape[-1]
        length = mask_Bx1xLxL.shape[-1]

        def heads(name):
            y_NxD = dense(width, name, self.dtype)(x_NxD)
            return y_NxD.reshape(-1, length, self.num_heads, width // self.num_heads)

        query, key, value = heads("query"), heads("key"), heads("value")
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        y_BxLxHxK = jax.nn.dot_product_attention(query, key, value, mask=mask_Bx1xLxL)
        return dense(width, "out", self.dtype)(y_BxLxHxK.reshape(-1, width))
