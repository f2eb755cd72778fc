"""The Optax chain, clipping, and which parameters decay."""

import jax
import jax.numpy as jnp
import optax


def adamw(learning_rate, hparams):
    """AdamW (Loshchilov & Hutter 2019)."""
    return optax.chain(
        optax.scale_by_adam(hparams["b1"], hparams["b2"], hparams["eps"]),
        optax.add_decayed_weights(hparams["weight_decay"], mask=decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def sgd(learning_rate, hparams):
    """Plain gradient descent, the optimizer that hides no error of scale in tests."""
    return optax.chain(
        optax.add_decayed_weights(hparams["weight_decay"], mask=decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def clip_factor(grad_norm, clip_norm):
    """What brings a gradient of this norm down to `clip_norm`; 1 where it is below."""
    return jnp.minimum(
        1, clip_norm / jnp.maximum(grad_norm, jnp.finfo(jnp.float32).tiny)
    )


def frozen_unless(is_sound, hparams):
    """Returns `hparams` where the gradient is sound; elsewhere such with which a
    gradient of -0.0 moves no moment of any of OPTIMIZERS by a bit."""
    decays = {name: jnp.where(is_sound, hparams[name], 1) for name in ("b1", "b2")}
    return hparams | decays


# Each is (learning_rate, hparams) -> GradientTransformation. Both arguments may be
# traced, so a transformation is made inside the step; its state's structure is fixed.
OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def decays(params):
    """True for kernels and embeddings; False for biases and norm scales.

    By name, never by number of dimensions: a scanned norm scale is a matrix.
    """

    def is_decayed(path, leaf):
        del leaf
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_decayed, params)
