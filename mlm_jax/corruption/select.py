"""Which units of a row are hidden and predicted.

Units are taken whole, in an order of random priority, until the row's budget of tokens
is spent. The order does not depend on the rate, so masks are nested: what a row hides
at 15% it also hides at 40%.

The unit that crosses the end of the budget is taken with the probability of the share
of it that fits, so that the expected count is the budget. One draw a row decides, the
same at every rate, which keeps masks nested.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Order(NamedTuple):
    """The tokens of a row by the priority of their unit, units in one piece; tokens of
    no unit last."""

    position_L: jax.Array
    priority_L: jax.Array  # of the unit; without weights in [0, 1)
    size_L: jax.Array  # tokens in the unit, 0 where there is none
    start_L: jax.Array  # tokens in all units before this one


def order_units(key, unit_L, weight_L):
    """Returns the `Order` of a row; `unit_L` is as `units` makes it.

    With `weight_L` (float32[L], above 0; None for equal weights) a unit is hidden in
    proportion to its mean weight, as far as a row of units allows: priorities are
    divided by it (sequential Poisson sampling, Ohlsson 1998).
    """
    length = len(unit_L)
    position_L = jnp.arange(length, dtype=jnp.int32)
    is_in_unit_L = unit_L < length
    first_L = jnp.minimum(unit_L, length - 1)

    def unit_sum(x_L):
        x_L = jnp.where(is_in_unit_L, x_L, 0)
        return jnp.zeros_like(x_L).at[first_L].add(x_L)[first_L]

    size_L = unit_sum(jnp.ones_like(unit_L))
    priority_L = jax.random.uniform(key, (length,))[first_L]
    if weight_L is not None:
        weight_L = unit_sum(weight_L) / jnp.maximum(size_L, 1)
        total = jnp.sum(weight_L, where=is_in_unit_L)
        mean = jnp.maximum(total / jnp.maximum(is_in_unit_L.sum(), 1), 1e-30)
        # A weight of 0 would be a priority of infinity: no unit is never hidden.
        priority_L = priority_L / jnp.maximum(weight_L / mean, 1e-6)
    priority_L = jnp.where(is_in_unit_L, priority_L, jnp.inf)
    size_L = jnp.where(is_in_unit_L, size_L, 0)
    # The unit breaks ties: a tie may not mix the tokens of two units.
    priority_L, unit_L, position_L, size_L = jax.lax.sort(
        (priority_L, unit_L, position_L, size_L), num_keys=3
    )
    start_L = jnp.arange(length) - (position_L - unit_L)
    return Order(position_L, priority_L, size_L, start_L)


def exact(draws, mean, rate, order):
    """rate x maskable, rounded to the nearest, halves to even as in BERT's code."""
    return _within(jnp.round(mean), draws, order)


def stochastic(draws, mean, rate, order):
    """rate x maskable, rounded up or down at random so that the mean is right."""
    is_up = draws[0] < mean - jnp.floor(mean)
    return _within(jnp.where(is_up, jnp.ceil(mean), jnp.floor(mean)), draws, order)


def bernoulli(draws, mean, rate, order):
    """Each unit on its own with probability `rate`: the count is binomial."""
    return order.priority_L < rate


def _within(budget, draws, order):
    # Not start + draw x size < budget: that sum may round up to the budget.
    return draws[1] * order.size_L < budget - order.start_L


COUNTS = {"exact": exact, "stochastic": stochastic, "bernoulli": bernoulli}


def chosen(draws, order, *, rate, min_predictions, count):
    """Returns bool[L], in the order of `order`: the tokens that `rate` reaches.

    `draws` are two uniform numbers of the row. Whatever the budget, units are taken
    until `min_predictions` tokens are.
    """
    is_in_unit_L = order.size_L > 0
    mean = rate * is_in_unit_L.sum(dtype=jnp.int32)
    is_chosen_L = COUNTS[count](draws, mean, rate, order)
    is_chosen_L = is_chosen_L | (order.start_L < min_predictions)
    return is_chosen_L & is_in_unit_L


def to_slots(is_predicted_L, order, num_slots):
    """Returns `predict_M` (int32: positions; slots not in use point at 0), `is_used_M`,
    and the number of predicted tokens without a slot. Units that do not fit whole find
    no slot."""
    number_L = jnp.cumsum(is_predicted_L) - 1
    rank_L = jnp.arange(len(number_L)) - order.start_L
    unit_end_L = number_L - rank_L + order.size_L
    fits_L = is_predicted_L & (unit_end_L <= num_slots)
    slot_L = jnp.where(fits_L, number_L, num_slots)
    empty_M = jnp.zeros_like(order.position_L, shape=num_slots)
    predict_M = empty_M.at[slot_L].set(order.position_L, mode="drop")
    num_used = fits_L.sum(dtype=jnp.int32)
    overflow = is_predicted_L.sum(dtype=jnp.int32) - num_used
    return predict_M, jnp.arange(num_slots) < num_used, overflow


def capacity(count, rate, max_maskable, min_predictions, slack, views):
    """Returns M, the prediction slots that a row needs at the highest rate it can meet.

    `slack` is the length of a unit beyond its first token that may cross the budget:
    exact and stochastic counts draw more only with a longer one. A Bernoulli row draws
    more with probability below 1e-7 where it expects two units or more (six standard
    deviations). Of several views the later ones have two ends that a unit may cross and
    a rounding may move. What does not fit is dropped whole and counted.
    """
    # In float32, as on the device: in double precision a half may round the other way.
    mean = float(np.float32(rate) * np.float32(max_maskable))
    deviation = math.sqrt(mean * (1 - rate) * (1 + slack))
    most = {
        "exact": round(mean) if views == 1 else math.ceil(mean),
        "stochastic": math.ceil(mean),
        "bernoulli": math.ceil(mean + 6 * deviation),
    }[count]
    return min(max(most, min_predictions, 1) + min(views, 2) * slack, max_maskable)
