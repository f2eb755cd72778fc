"""The vectors of a row's tokens as one."""

import jax.numpy as jnp


def mean(x_BxLxD, segment_BxL):
    """Over all tokens of the text, [CLS] and [SEP] included, as Sentence-BERT does
    (Reimers & Gurevych 2019)."""
    weight_BxL = (segment_BxL > 0).astype(jnp.float32)
    total_BxD = jnp.einsum("bld,bl->bd", x_BxLxD, weight_BxL)
    return total_BxD / jnp.maximum(weight_BxL.sum(1), 1)[:, None]


def cls(x_BxLxD, segment_BxL):
    """The state at [CLS]."""
    del segment_BxL
    return x_BxLxD[:, 0].astype(jnp.float32)


POOLINGS = {"mean": mean, "cls": cls}
