"""Which positions of a row are predicted.

Positions are taken in an order of random priority until the row's budget is spent. The
order does not depend on the rate, so masks are nested: what a row hides at 15% it also
hides at 40%.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def exact(budget_key, priority_L, mean, rate):
    """rate x maskable, rounded to the nearest, halves to even as in BERT's code."""
    del budget_key, priority_L, rate
    return jnp.round(mean)


def stochastic(budget_key, priority_L, mean, rate):
    """rate x maskable, rounded up or down at random so that the mean is right."""
    del priority_L, rate
    is_up = jax.random.uniform(budget_key) < mean - jnp.floor(mean)
    return jnp.where(is_up, jnp.ceil(mean), jnp.floor(mean))


def bernoulli(budget_key, priority_L, mean, rate):
    """Each position on its own with probability `rate`: the count is binomial."""
    del budget_key, mean
    return jnp.sum(priority_L < rate)


COUNTS = {"exact": exact, "stochastic": stochastic, "bernoulli": bernoulli}


def capacity(count, rate, max_maskable, min_predictions):
    """Returns M, the prediction slots that a row needs at the highest rate it can meet.

    Exact and stochastic counts never draw more. A Bernoulli row may, with probability
    below 1e-7 where it expects two predictions or more (six standard deviations). What
    does not fit is dropped, the last in the order of priority, which is uniformly.
    """
    # In float32, as on the device: in double precision a half may round the other way.
    mean = float(np.float32(rate) * np.float32(max_maskable))
    most = {
        "exact": round(mean),
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
    # Priorities are below 1; what may not be chosen comes last, at 2.
    priority_L = jax.random.uniform(priority_key, is_maskable_L.shape)
    priority_L = jnp.where(is_maskable_L, priority_L, 2.0)
    num_maskable = is_maskable_L.sum(dtype=jnp.int32)
    budget = COUNTS[count](budget_key, priority_L, rate * num_maskable, rate)
    budget = jnp.maximum(budget.astype(jnp.int32), min_predictions)
    budget = jnp.minimum(budget, num_maskable)

    _, order_M = jax.lax.top_k(-priority_L, num_slots)
    is_used_M = jnp.arange(num_slots) < budget
    overflow = jnp.maximum(budget - num_slots, 0)
    return jnp.where(is_used_M, order_M, 0), is_used_M, overflow
