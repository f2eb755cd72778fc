"""Which positions of a row are predicted.

Positions are taken in an order of random priority until the row's budget is spent. The
order does not depend on the rate, so masks are nested: what a row hides at 15% it also
hides at 40%.
"""

import math

import jax
import jax.numpy as jnp


def exact(budget_key, priority_L, is_maskable_L, rate):
    """rate x maskable, rounded to the nearest, halves up."""
    del budget_key, priority_L
    return jnp.floor(rate * is_maskable_L.sum() + 0.5).astype(jnp.int32)


def stochastic(budget_key, priority_L, is_maskable_L, rate):
    """rate x maskable, rounded up or down at random so that the mean is right."""
    del priority_L
    offset = jax.random.uniform(budget_key)
    return jnp.floor(rate * is_maskable_L.sum() + offset).astype(jnp.int32)


def bernoulli(budget_key, priority_L, is_maskable_L, rate):
    """Each position on its own with probability `rate`: the count is binomial."""
    del budget_key
    return jnp.sum(is_maskable_L & (priority_L < rate), dtype=jnp.int32)


COUNTS = {"exact": exact, "stochastic": stochastic, "bernoulli": bernoulli}


def capacity(count, rate, max_maskable, min_predictions):
    """Returns M, the prediction slots that a row needs at the highest rate it can meet.

    Exact and stochastic counts never draw more. A Bernoulli row does with probability
    below 1e-8 (six standard deviations, normal tail); what does not fit is dropped, the
    lowest priorities first, which is uniformly.
    """
    mean = rate * max_maskable
    most = {
        "exact": math.floor(mean + 0.5),
        "stochastic": math.ceil(mean),
        "bernoulli": math.ceil(mean + 6 * math.sqrt(mean * (1 - rate))),
    }[count]
    return min(max(most, min_predictions, 1), max_maskable)


def select(key, is_maskable_L, *, rate, min_predictions, count, num_slots):
    """Chooses the positions of one row.

    Returns `predict_M` (int32: positions; slots not in use point at 0), `is_used_M`,
    and the number of predictions that found no slot.
    """
    budget_key, priority_key = jax.random.split(key)
    priority_L = jax.random.uniform(priority_key, is_maskable_L.shape)
    budget = COUNTS[count](budget_key, priority_L, is_maskable_L, rate)
    budget = jnp.clip(budget, min_predictions, None)
    budget = jnp.minimum(budget, is_maskable_L.sum(dtype=jnp.int32))

    last = jnp.float32(2)  # priorities are below 1
    _, order_M = jax.lax.top_k(-jnp.where(is_maskable_L, priority_L, last), num_slots)
    is_used_M = jnp.arange(num_slots) < budget
    overflow = jnp.maximum(budget - num_slots, 0)
    return jnp.where(is_used_M, order_M, 0), is_used_M, overflow
