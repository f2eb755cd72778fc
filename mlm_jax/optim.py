"""The Optax chains, clipping, and which parameters decay.

Blocks are scanned, so each of their matrices is a stack of one per layer. What looks at
a matrix as a whole looks at each layer's apart: `per_layer`, and Muon's axes.
"""

import jax
import jax.numpy as jnp
import optax
import optax.contrib


def adamw(learning_rate, hparams):
    """AdamW (Loshchilov & Hutter 2019)."""
    return _decayed(_adam(hparams), learning_rate, hparams)


def stable_adamw(learning_rate, hparams):
    """AdamW whose update of a matrix is divided by the root mean square of
    g / sqrt(v), where that is above 1 (Wortsman et al. 2023, algorithm 2): a second
    moment that lags behind does no harm."""
    adam = _adam(hparams)

    def update(grads, state, params=None):
        updates, state = adam.update(grads, state, params)
        nu = optax.tree.bias_correction(state.nu, hparams["b2"], state.count)

        def clipped(u, g, v):
            ratio = jnp.mean(g**2 / jnp.maximum(v, hparams["eps"] ** 2))
            return u / jnp.maximum(1, jnp.sqrt(ratio))

        return _map_layers(clipped, updates, grads, nu), state

    stable = optax.GradientTransformation(adam.init, update)
    return _decayed(stable, learning_rate, hparams)


def lamb(learning_rate, hparams):
    """LAMB (You et al. 2020). Biases and norms are neither decayed nor scaled by their
    norm, as in the authors' code."""
    return optax.chain(
        _adam(hparams),
        optax.add_decayed_weights(hparams["weight_decay"], mask=decays),
        optax.masked(per_layer(optax.scale_by_trust_ratio()), decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def lion(learning_rate, hparams):
    """Lion (Chen et al. 2023), which wants a learning rate of a third to a tenth of
    AdamW's."""
    sign = optax.scale_by_lion(hparams["b1"], hparams["b2"])
    return _decayed(sign, learning_rate, hparams)


def adafactor(learning_rate, hparams):
    """Adafactor without momentum (Shazeer & Stern 2018): second moments of rows and
    columns only; the learning rate is relative to a matrix's root mean square."""

    def decay_rate(count, exponent):
        # b2 itself is not used, but for `frozen_unless`.
        rate = 1 - (count + 1.0) ** -exponent
        return jnp.where(hparams["b2"] == 1, 1, rate)

    factored = optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=decay_rate),
        per_layer(optax.clip_by_block_rms(1.0)),
        per_layer(optax.scale_by_param_block_rms()),
    )
    return _decayed(factored, learning_rate, hparams)


def muon(learning_rate, hparams):
    """Muon (Jordan et al. 2024) for the matrices of blocks and head, with `b1` as its
    momentum; AdamW for embeddings, biases and norms. An update has the size of
    AdamW's, so that one learning rate serves both (Liu et al. 2025)."""
    orthogonal = optax.contrib.scale_by_muon(
        beta=hparams["b1"], weight_dimension_numbers=_matrix_axes
    )
    partition = optax.partition(
        {
            "muon": optax.chain(orthogonal, optax.stateless(_like_adams)),
            "adam": _adam(hparams),
        },
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if path[-1].key == "kernel" else "adam", params
        ),
    )
    return _decayed(partition, learning_rate, hparams)


def sgd(learning_rate, hparams):
    """Plain gradient descent, the optimizer that hides no error of scale in tests."""
    return _decayed(optax.identity(), learning_rate, hparams)


def _adam(hparams):
    return optax.scale_by_adam(hparams["b1"], hparams["b2"], hparams["eps"])


def _decayed(transform, learning_rate, hparams):
    return optax.chain(
        transform,
        optax.add_decayed_weights(hparams["weight_decay"], mask=decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def _matrix_axes(updates):
    """The last two axes; what comes before them are layers."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree.map(lambda _: axes, updates)


def _like_adams(updates, params):
    """An orthogonal matrix [D, F] has a root mean square of 1 / sqrt(max(D, F)), an
    update of AdamW about 0.2."""
    del params
    return jax.tree.map(lambda u: 0.2 * max(u.shape[-2:]) ** 0.5 * u, updates)


def per_layer(transform):
    """Returns a transformation without state that looks at each layer's matrices
    apart."""

    def update(updates, params):
        def one(update, param):
            return transform.update(update, transform.init(param), param)[0]

        return _map_layers(one, updates, params)

    return optax.stateless(update)


def _map_layers(function, tree, *rest):
    """`jax.tree.map`, a layer at a time where a leaf has one for each."""

    def call(path, *leaves):
        is_stack = any(getattr(part, "key", None) == "blocks" for part in path)
        return jax.vmap(function)(*leaves) if is_stack else function(*leaves)

    return jax.tree_util.tree_map_with_path(call, tree, *rest)


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
OPTIMIZERS = {
    "adamw": adamw,
    "stable_adamw": stable_adamw,
    "lamb": lamb,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "sgd": sgd,
}


def decays(params):
    """True for kernels and embeddings; False for biases and norm scales.

    By name, never by number of dimensions: a scanned norm scale is a matrix.
    """

    def is_decayed(path, leaf):
        del leaf
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_decayed, params)
