"""Learning-rate shapes as functions of the update's number.

Updates are counted from 1: update k of K uses `scale(k)`. With W warm-up updates the
scale rises in a line from 0 before the first update to 1 at update W, reached exactly
once, and then decays to its end value at update K. It may stay at 1 for a while, and
begin to decay after update `decay_begin`: warm-up, stable, decay.

These are our own functions because Optax's check their durations in Python, and ours
may be traced: a sweep over schedules then needs one compilation.
"""

import jax.numpy as jnp


def constant(fraction, growth):
    del growth
    return jnp.ones_like(fraction)


def linear(fraction, growth):
    del growth
    return 1 - fraction


def cosine(fraction, growth):
    del growth
    return (1 + jnp.cos(jnp.pi * fraction)) / 2


def one_minus_sqrt(fraction, growth):
    """Best after a long stable phase (Hägele et al. 2024)."""
    del growth
    return 1 - jnp.sqrt(fraction)


def inverse_sqrt(fraction, growth):
    """That of the Transformer (Vaswani et al. 2017); it ends at no certain value."""
    del fraction
    return growth**-0.5


# Each is (fraction, growth) -> scale: what share of the decay is behind, and how many
# times the updates before it the updates so far are.
DECAYS = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "one_minus_sqrt": one_minus_sqrt,
    "inverse_sqrt": inverse_sqrt,
}


def scale(update, *, schedule, warmup_steps, num_steps, decay_begin):
    """Returns float32 in [0, 1], the share of the peak that `update` (1-based) uses."""
    update = jnp.asarray(update, jnp.float32)
    warmup = update / jnp.maximum(warmup_steps, 1)
    begin = jnp.maximum(warmup_steps, decay_begin)
    fraction = jnp.clip((update - begin) / jnp.maximum(num_steps - begin, 1), 0, 1)
    growth = jnp.clip(update, 1, num_steps) / jnp.maximum(begin, 1)
    decay = DECAYS[schedule](fraction, jnp.maximum(growth, 1))
    return jnp.where(update < warmup_steps, warmup, decay)
