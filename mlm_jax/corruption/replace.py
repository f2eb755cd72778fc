"""What stands at a predicted position: the mask, a random token, or itself."""

import enum

import jax
import jax.numpy as jnp
import numpy as np


class Action(enum.IntEnum):
    NONE = 0
    MASK = 1
    RANDOM = 2
    KEEP = 3


def non_special(is_special_V):
    """Every ordinary token, each as likely."""
    return np.flatnonzero(~is_special_V).astype(np.int32)


def full_vocab(is_special_V):
    """The whole vocabulary, special tokens too, as BERT and Hugging Face draw."""
    return np.arange(len(is_special_V), dtype=np.int32)


POOLS = {"non_special": non_special, "full_vocab": full_vocab}


def replace(key, tokens_L, is_selected_L, *, mask_frac, random_frac, mask_id, pool_P):
    """Returns the corrupted tokens and the `Action` at each position.

    RANDOM counts the draws: one in P of them gives the original token again.
    """
    action_key, token_key = jax.random.split(key)
    draw_L = jax.random.uniform(action_key, tokens_L.shape)
    index_L = jax.random.randint(token_key, tokens_L.shape, 0, len(pool_P))
    random_L = jnp.asarray(pool_P)[index_L]

    keep_L = jnp.where(draw_L < mask_frac + random_frac, Action.RANDOM, Action.KEEP)
    action_L = jnp.where(draw_L < mask_frac, Action.MASK, keep_L)
    action_L = jnp.where(is_selected_L, action_L, Action.NONE)
    inputs_L = jnp.where(action_L == Action.RANDOM, random_L, tokens_L)
    inputs_L = jnp.where(action_L == Action.MASK, mask_id, inputs_L)
    return inputs_L, action_L
