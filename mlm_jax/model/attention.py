"""Bidirectional attention within segments."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlm_jax.model.layers import Parts, dropout


def segment_mask(segment_BxL):
    """Returns bool[B, 1, L, L]: who may look at whom.

    Padding (segment 0) sees padding, so no softmax is ever over nothing.
    """
    return (segment_BxL[:, :, None] == segment_BxL[:, None, :])[:, None]


def near_mask(length, window):
    """Returns bool[1, 1, L, L]: who is at most `window` tokens away."""
    position_L = jnp.arange(length)
    distance_LxL = jnp.abs(position_L[:, None] - position_L[None, :])
    return (distance_LxL <= window)[None, None]


def rotation(position_BxL, head_size, base):
    """Returns (cos, sin), float32[B, L, 1, K/2], of how far each pair of a head's units
    turns at each position: the k-th by base^(-2k/K) a token (Su et al. 2021)."""
    half = head_size // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = position_BxL[:, :, None, None] * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BxLxHxK, cos, sin):
    """Turns the pairs (k, k + K/2), so that a product of query and key depends on the
    distance of their positions."""
    x1, x2 = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BxLxHxK.dtype)


class SelfAttention(nn.Module):
    """Attention of `num_heads` heads; no rotation if `cos_sin` is None.

    With `keys_B` the attention weights are dropped out at rate `dropout`, as in BERT.
    """

    num_heads: int
    dropout: float
    parts: Parts

    @nn.compact
    def __call__(self, x_NxD, mask_Bx1xLxL, cos_sin, keys_B):
        width = x_NxD.shape[-1]
        length = mask_Bx1xLxL.shape[-1]

        def heads(name):
            y_NxD = self.parts.dense(width, name=name)(x_NxD)
            return y_NxD.reshape(-1, length, self.num_heads, width // self.num_heads)

        query, key, value = heads("query"), heads("key"), heads("value")
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        if keys_B is None or self.dropout == 0:
            y_BxLxHxK = jax.nn.dot_product_attention(
                query, key, value, mask=mask_Bx1xLxL
            )
        else:
            y_BxLxHxK = attend(
                query,
                key,
                value,
                mask_Bx1xLxL,
                lambda w: dropout(keys_B, w, self.dropout),
            )
        y_NxD = y_BxLxHxK.reshape(-1, width)
        return self.parts.dense(width, name="out")(y_NxD)


def attend(query, key, value, mask_Bx1xLxL, drop):
    """Attention with its weights at hand, which fused kernels keep to themselves."""
    scale = query.shape[-1] ** -0.5
    score_BxHxLxL = jnp.einsum(
        "blhk,bshk->bhls", query * scale, key, preferred_element_type=jnp.float32
    )
    score_BxHxLxL = jnp.where(mask_Bx1xLxL, score_BxHxLxL, -jnp.inf)
    weight_BxHxLxL = jax.nn.softmax(score_BxHxLxL).astype(query.dtype)
    return jnp.einsum("bhls,bshk->blhk", drop(weight_BxHxLxL), value)
