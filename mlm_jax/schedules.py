"""Learning-rate shapes as functions of the update's number.

Updates are counted from 1: update k of K uses `scale(k)`. With W warm-up updates the
scale rises in a line from 0 before the first update to 1 at update W, reached exactly
once, and then decays to its end value at update K. It may stay at 1 for a while, and
begin to decay after update `decay_begin`: warm-up, stable, decay.

These are our own functions because Optax's check their durations in Python, and ours
may be traced: a sweep over schedules then needs one compilation.
"""

import jax.numpy as jnp


def constant(fraction):
    return jnp.ones_like(fraction)


def linear(fraction):
    return 1 - fraction


def cosine(fraction):
    return (1 + jnp.cos(jnp.pi * fraction)) / 2


DECAYS = {"constant": constant, "linear": linear, "cosine": cosine}


def scale(update, *, schedule, warmup_steps, num_steps, decay_begin):
    """Returns float32 in [0, 1], the share of the peak that `update` (1-based) uses."""
    update = jnp.asarray(update, jnp.float32)
    warmup = update / jnp.maximum(warmup_steps, 1)
    begin = jnp.maximum(warmup_steps, decay_begin)
    fraction = jnp.clip((update - begin) / jnp.maximum(num_steps - begin, 1), 0, 1)
    return jnp.where(update < warmup_steps, warmup, DECAYS[schedule](fraction))
