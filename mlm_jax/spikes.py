"""Spikes: updates whose loss or gradient norm is far above those just before them.

The last updates that were made are remembered in the state, so that a spike is known
on the device before it does harm, by every device alike, and after a resume.
"""

import jax.numpy as jnp

WINDOW = 128  # updates, as OLMo's trainer and MaxText have it
ENOUGH = 64  # before so many, nothing is ordinary


def nothing_seen():
    """Returns the memory of a run before its first update: `loss` and `grad_norm`,
    float32[WINDOW] as a ring, and the number of updates that went in."""
    zeros_W = jnp.zeros(WINDOW, jnp.float32)
    return {"loss": zeros_W, "grad_norm": zeros_W, "count": jnp.int32(0)}


def is_spike(recent, values, sigmas):
    """True if one of `values` (`loss`, `grad_norm`) is more than `sigmas` standard
    deviations above the mean of those remembered. NaN never is, nor is anything before
    ENOUGH updates."""
    num = jnp.minimum(recent["count"], WINDOW)
    is_seen_W = jnp.arange(WINDOW) < num
    found = jnp.bool_(False)
    for name, value in values.items():
        mean = jnp.sum(recent[name]) / num
        variance = jnp.sum((recent[name] - mean) ** 2, where=is_seen_W) / num
        found |= value > mean + sigmas * jnp.sqrt(variance)
    return found & (num >= ENOUGH)


def remember(recent, values):
    """Returns the memory with one more update, in place of the oldest."""
    place = recent["count"] % WINDOW
    rings = {name: recent[name].at[place].set(value) for name, value in values.items()}
    return rings | {"count": recent["count"] + 1}
