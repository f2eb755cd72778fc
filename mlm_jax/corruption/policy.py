"""The corruption policy: select + replace for each row, and a ledger of what it did."""

import jax
import jax.numpy as jnp

from mlm_jax import keys
from mlm_jax.corruption import replace, select
from mlm_jax.corruption.replace import Action


def make_corrupt(*, count, num_slots, random_pool, mask_id, is_special_V):
    """Returns `corrupt(key, batch, hparams) -> (batch, ledger)`.

    Settings here fix the shape of the computation. Numbers are traced: `hparams` holds
    `rate`, `min_predictions`, `mask_frac` and `random_frac`, so that changing one never
    recompiles.

    Of the batch it reads `tokens` int32[B, L], `segment` int32[B, L] (0 is padding),
    `row` int32[B] and `epoch` int32[B]. It adds `inputs` int32[B, L], `predict`
    int32[B, M] (positions), `targets` int32[B, M] and `weights` float32[B, M] (1 where
    the slot is in use). Special tokens and padding are never selected.
    """
    pool_P = replace.POOLS[random_pool](is_special_V)
    is_special_V = jnp.asarray(is_special_V)

    def corrupt_row(key, tokens_L, segment_L, hparams):
        select_key, replace_key = jax.random.split(key)
        is_maskable_L = (segment_L > 0) & ~is_special_V[tokens_L]
        predict_M, is_used_M, overflow = select.select(
            select_key,
            is_maskable_L,
            rate=hparams["rate"],
            min_predictions=hparams["min_predictions"],
            count=count,
            num_slots=num_slots,
        )
        is_selected_L = jnp.zeros_like(is_maskable_L).at[predict_M].max(is_used_M)
        inputs_L, action_L = replace.replace(
            replace_key,
            tokens_L,
            is_selected_L,
            mask_frac=hparams["mask_frac"],
            random_frac=hparams["random_frac"],
            mask_id=mask_id,
            pool_P=pool_P,
        )
        targets_M = jnp.where(is_used_M, tokens_L[predict_M], 0)
        weights_M = is_used_M.astype(jnp.float32)
        ledger = {"num_maskable": is_maskable_L.sum(), "num_overflow": overflow}
        return inputs_L, action_L, predict_M, targets_M, weights_M, ledger

    def corrupt(key, batch, hparams):
        row_keys = keys.row_keys(key, batch["epoch"], batch["row"])
        inputs, action, predict, targets, weights, ledger = jax.vmap(
            corrupt_row, in_axes=(0, 0, 0, None)
        )(row_keys, batch["tokens"], batch["segment"], hparams)
        ledger = {name: rows_B.sum() for name, rows_B in ledger.items()}
        ledger |= {
            "num_mask_tokens": jnp.sum(action == Action.MASK),
            "num_random_tokens": jnp.sum(action == Action.RANDOM),
            "num_kept_tokens": jnp.sum(action == Action.KEEP),
            "mask_hash": mask_hash(batch, inputs, action),
        }
        corrupted = dict(
            inputs=inputs, predict=predict, targets=targets, weights=weights
        )
        return batch | corrupted, ledger

    return corrupt


def mask_hash(batch, inputs_BxL, action_BxL):
    """Returns uint32, the same for the same masks in whatever order they are met."""
    length = inputs_BxL.shape[1]
    values = (
        batch["epoch"][:, None],
        batch["row"][:, None],
        jnp.arange(length)[None],
        inputs_BxL,
    )
    hash_BxL = jnp.zeros(inputs_BxL.shape, jnp.uint32)
    for value in values:
        hash_BxL = _mix(hash_BxL ^ value.astype(jnp.uint32))
    return jnp.sum(jnp.where(action_BxL != Action.NONE, hash_BxL, 0), dtype=jnp.uint32)


def _mix(x):
    """The finaliser of MurmurHash3, after a step of the golden ratio: every bit of x
    reaches every bit of the result, and 0 does not map to 0."""
    x = x + jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
