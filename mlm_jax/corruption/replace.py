"""What stands at a hidden position: the mask, a random token, or the token itself."""

import enum

import jax
import jax.numpy as jnp
import numpy as np


class Action(enum.IntEnum):
    NONE = 0
    MASK = 1
    RANDOM = 2
    KEEP = 3


def non_special(is_special_V, counts_V):
    """Every ordinary token is as likely."""
    del counts_V
    return _thresholds(~is_special_V)


def full_vocab(is_special_V, counts_V):
    """The whole vocabulary, special tokens too, as BERT and Hugging Face draw."""
    del counts_V
    return _thresholds(np.ones_like(is_special_V))


def unigram(is_special_V, counts_V):
    """Ordinary tokens as often as they occur in the training rows."""
    return _thresholds(np.where(is_special_V, 0, counts_V))


# Each returns uint32[V]: token v is drawn if threshold v - 1 <= 32 random bits < v's.
POOLS = {"non_special": non_special, "full_vocab": full_vocab, "unigram": unigram}


def _thresholds(weights_V):
    share_V = np.cumsum(weights_V, dtype=np.float64) / np.sum(weights_V)
    # The last share is 1, which 32 bits do not hold: bits at the top belong to it.
    return np.minimum(share_V * 2**32, 2**32 - 1).astype(np.uint32)


def draw_tokens(key, shape, thresholds_V):
    bits = jax.random.bits(key, shape)
    top = thresholds_V.max() - np.uint32(1)  # the last token with a share
    return jnp.searchsorted(thresholds_V, jnp.minimum(bits, top), side="right")


def replace(
    key,
    tokens_L,
    unit_L,
    is_hidden_L,
    *,
    mask_frac,
    random_frac,
    per_unit,
    mask_id,
    thresholds_V,
):
    """Returns the corrupted tokens and the `Action` at each position.

    One draw decides for a position, or with `per_unit` (a traced bool) for a unit.
    RANDOM counts the draws: now and then one of them gives the original token again.
    """
    action_key, token_key = jax.random.split(key)
    draw_L = jax.random.uniform(action_key, tokens_L.shape)
    first_L = jnp.minimum(unit_L, len(unit_L) - 1)
    draw_L = jnp.where(per_unit, draw_L[first_L], draw_L)
    random_L = draw_tokens(token_key, tokens_L.shape, thresholds_V)

    keep_L = jnp.where(draw_L < mask_frac + random_frac, Action.RANDOM, Action.KEEP)
    action_L = jnp.where(draw_L < mask_frac, Action.MASK, keep_L)
    action_L = jnp.where(is_hidden_L, action_L, Action.NONE)
    inputs_L = jnp.where(action_L == Action.RANDOM, random_L, tokens_L)
    inputs_L = jnp.where(action_L == Action.MASK, mask_id, inputs_L)
    return inputs_L.astype(tokens_L.dtype), action_L
