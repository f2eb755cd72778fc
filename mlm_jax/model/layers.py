"""The small pieces that every block is made of."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

init_weights = nn.initializers.truncated_normal(0.02)  # Devlin et al. 2019


def dense(features, name, dtype):
    """A dense layer for [N, D] input: XLA's CPU backend multiplies two matrices about
    1.3 times as fast as a matrix and a batch of them, so rows stay flattened."""
    return nn.Dense(features, dtype=dtype, kernel_init=init_weights, name=name)


def layer_norm(name, dtype):
    return nn.LayerNorm(epsilon=1e-12, dtype=dtype, name=name)


def dropout(keys_B, x_NxD, rate):
    """Drops units of the rows x_NxD (N = B x L) with one key for each of the B rows.

    `keys_B` None means no dropout. The rate is met to 1 / 65,536, since each unit
    spends 16 random bits, half of what a uniform draw costs.
    """
    if keys_B is None or rate == 0:
        return x_NxD
    num_units = x_NxD.size // len(keys_B)
    num_words = (num_units + 1) // 2
    words = jax.vmap(lambda key: jax.random.bits(key, (num_words,)))(keys_B)
    bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(len(keys_B), -1)
    threshold = round(rate * 2**16)
    keep_NxD = (bits[:, :num_units] >= threshold).reshape(x_NxD.shape)
    scale = jnp.asarray(1 / (1 - threshold / 2**16), x_NxD.dtype)
    return jnp.where(keep_NxD, x_NxD * scale, 0)


@jax.custom_jvp
def gelu(x):
    """The exact GELU, x Phi(x) (Hendrycks & Gimpel 2016), through erf.

    The derivative is given because JAX 0.12's own, through its `polynomial` primitive,
    is refused by shard_map's replication check. Computed in float32: in bfloat16 the
    sum 1 + erf would lose the negative side.
    """
    return _gelu(x.astype(jnp.float32))[0].astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    y, dy_dx = _gelu(x.astype(jnp.float32))
    return y.astype(x.dtype), dy_dx.astype(x.dtype) * dx


def _gelu(x):
    """Returns (x Phi(x), its derivative Phi(x) + x phi(x))."""
    cdf = (1 + jax.lax.erf(x / math.sqrt(2))) / 2
    density = jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return x * cdf, cdf + x * density


class MLP(nn.Module):
    """Two dense layers with the exact (erf) GELU between them."""

    mlp_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_NxD):
        h_NxF = dense(self.mlp_width, "up", self.dtype)(x_NxD)
        h_NxF = gelu(h_NxF)
        return dense(x_NxD.shape[-1], "down", self.dtype)(h_NxF)
