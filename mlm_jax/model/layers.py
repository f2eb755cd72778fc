"""The small pieces that every block is made of."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

PRODUCT = "product"  # what `remat` may keep, by name: no policy looks into a custom_vjp
init_weights = nn.initializers.truncated_normal(0.02)  # Devlin et al. 2019


class Dense(nn.Module):
    """x @ kernel, + bias if it has one, of [N, D] input, computed in `dtype`.

    Rows stay flattened: XLA's CPU backend multiplies two matrices about 1.3 times as
    fast as a matrix and a batch of them.
    """

    features: int
    dtype: jnp.dtype
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_NxD):
        shape = x_NxD.shape[-1], self.features
        kernel_DxF = self.param("kernel", init_weights, shape)
        y_NxF = _matmul(x_NxD.astype(self.dtype), kernel_DxF)
        y_NxF = checkpoint_name(y_NxF, PRODUCT)
        if not self.use_bias:
            return y_NxF
        bias_F = self.param("bias", nn.initializers.zeros, (self.features,))
        return y_NxF + bias_F.astype(self.dtype)[None]


@jax.custom_vjp
def _matmul(x_NxD, kernel_DxF):
    """The product in the dtype of x; the kernel's gradient is summed in its own."""
    return x_NxD @ kernel_DxF.astype(x_NxD.dtype)


def _matmul_forward(x_NxD, kernel_DxF):
    return _matmul(x_NxD, kernel_DxF), (x_NxD, kernel_DxF)


def _matmul_backward(residuals, dy_NxF):
    x_NxD, kernel_DxF = residuals
    dx_NxD = _dot(dy_NxF, kernel_DxF.astype(dy_NxF.dtype), (1, 1), dy_NxF.dtype)
    # XLA's CPU backend takes 1.4 times as long for a tall sum over N as for a wide one.
    if x_NxD.shape[1] > dy_NxF.shape[1]:
        return dx_NxD, _dot(dy_NxF, x_NxD, (0, 0), kernel_DxF.dtype).T
    return dx_NxD, _dot(x_NxD, dy_NxF, (0, 0), kernel_DxF.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _dot(a, b, contract, dtype):
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def dropout(keys_B, x, rate):
    """Drops units of B rows, `x` [N, D] with N = B x L or [B, ...], by a key for each.

    `keys_B` None means no dropout. The rate is met to 1 / 65,536.
    """
    if keys_B is None or rate == 0:
        return x
    threshold = round(rate * 2**16)
    bits = _random_bits(keys_B, x.size // len(keys_B)).reshape(x.shape)
    scale = jnp.asarray(1 / (1 - threshold / 2**16), x.dtype)
    return jnp.where(bits >= threshold, x * scale, 0)


def _random_bits(keys_B, num_units):
    """Returns uint16[B, num_units], two from each hashed counter.

    A counter through the finalizer of MurmurHash3 with the row's key, since threefry's
    bits are 3% of a training step on a CPU; good enough to drop units, and nothing else
    is drawn by it.
    """
    key_Bx2 = jax.random.key_data(keys_B).astype(jnp.uint32)
    shape = len(keys_B), (num_units + 1) // 2
    counter = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    h = counter * np.uint32(0x9E3779B9) + key_Bx2[:, :1]
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B) ^ key_Bx2[:, -1:]
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    h = h ^ (h >> 16)
    bits = jax.lax.bitcast_convert_type(h, jnp.uint16).reshape(len(keys_B), -1)
    return bits[:, :num_units]


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


def _in_float32(function):
    return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "silu": _in_float32(jax.nn.silu),
    "relu": jax.nn.relu,
}


class Parts(NamedTuple):
    """What all layers of a model are made of: `dense(features, name=…)` and
    `norm(name=…)` return modules, `activation` is a function."""

    dense: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    activation: Callable


def make_parts(*, norm, norm_epsilon, norm_bias, bias, activation, dtype):
    """Returns the `Parts` that these fields of a config's `model` section stand for."""
    kind: Callable[..., nn.Module] = nn.RMSNorm  # Zhang & Sennrich 2019
    if norm == "layer_norm":
        kind = functools.partial(nn.LayerNorm, use_bias=norm_bias)
    make_norm = functools.partial(kind, epsilon=norm_epsilon, dtype=dtype)
    dense = functools.partial(Dense, dtype=dtype, use_bias=bias)
    return Parts(dense, make_norm, ACTIVATIONS[activation])


class MLP(nn.Module):
    """Two dense layers with the activation between them. With `is_gated` it is that of
    a third, and multiplied with the first (GeGLU, SwiGLU: Shazeer 2020)."""

    mlp_width: int
    is_gated: bool
    parts: Parts

    @nn.compact
    def __call__(self, x_NxD):
        dense, activation = self.parts.dense, self.parts.activation
        h_NxF = dense(self.mlp_width, name="up")(x_NxD)
        if self.is_gated:
            h_NxF = activation(dense(self.mlp_width, name="gate")(x_NxD)) * h_NxF
        else:
            h_NxF = activation(h_NxF)
        return dense(x_NxD.shape[-1], name="down")(h_NxF)
