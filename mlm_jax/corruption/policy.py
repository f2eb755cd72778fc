"""The corruption policy: partition + select + replace, and a ledger of what it did."""

import jax
import jax.numpy as jnp

from mlm_jax import keys
from mlm_jax.corruption import replace, schedule, select, units, weights
from mlm_jax.corruption.replace import Action

MAX_UNIT = 16  # unit lengths from this on share the last place of the ledger


def make_corrupt(
    *,
    strategy,
    collocations,
    token_weights,
    count,
    num_slots,
    views,
    random_pool,
    mask_id,
    is_special_V,
    counts_V,
):
    """Returns `corrupt(key, batch, hparams, progress) -> (batch, ledger)`.

    Settings here fix the shape of the computation. Numbers are traced: `hparams` is as
    `settings.hparams` makes it, `progress` the share of the updates done, so
    that changing a rate, a fraction, a schedule or a seed never recompiles.

    Of the batch it reads `tokens` int32[B, L], `segment` int32[B, L] (0 is padding),
    `word_start` bool[B, L], `row` int32[B] and `epoch` int32[B]. It adds `inputs`
    int32[B, L], `predict` int32[B, M] (positions), `targets` int32[B, M], `weights`
    float32[B, M] (0 where the slot is not in use), and for those who look on `unit`
    int32[B, L] (see `units`) and `action` int32[B, L] (see `replace.Action`). Special
    tokens and padding are never hidden. With more than one view each row comes `views`
    times, its views side by side, each with other units hidden.
    """
    thresholds_V = replace.POOLS[random_pool](is_special_V, counts_V)
    is_special_V = jnp.asarray(is_special_V)
    partition = units.make_partition(strategy, collocations)

    def corrupt_row(
        key, view, tokens_L, segment_L, word_start_L, hparams, rate, weight_V
    ):
        unit_key, order_key, draw_key, rate_key, replace_key = jax.random.split(key, 5)
        is_maskable_L = (segment_L > 0) & ~is_special_V[tokens_L]
        unit_L = partition(unit_key, tokens_L, word_start_L, is_maskable_L, hparams)
        weight_L = None if weight_V is None else weight_V[tokens_L]
        order = select.order_units(order_key, unit_L, weight_L)
        draws = jax.random.uniform(draw_key, (2,))

        low, high = hparams["row_rate_low"], hparams["row_rate_high"]
        rate = jnp.where(
            high > 0, low + (high - low) * jax.random.uniform(rate_key), rate
        )

        def chosen(rate, min_predictions):
            numbers = {"rate": rate, "min_predictions": min_predictions}
            return select.chosen(draws, order, count=count, **numbers)

        # View v hides what the rate (v + 1) r reaches and the rate v r does not.
        least = hparams["min_predictions"]
        is_hidden_L = chosen((view + 1) * rate, (view + 1) * least)
        is_hidden_L &= ~chosen(view * rate, view * least)
        # Fewer predictions than corruptions: those of highest priority.
        share = hparams["predicted_share"]
        is_predicted_L = is_hidden_L & ((share >= 1) | chosen(share * rate, least))
        predict_M, is_used_M, overflow = select.to_slots(
            is_predicted_L, order, num_slots
        )

        inputs_L, action_L = replace.replace(
            replace_key,
            tokens_L,
            unit_L,
            jnp.zeros_like(is_maskable_L).at[order.position_L].set(is_hidden_L),
            mask_frac=hparams["mask_frac"],
            random_frac=hparams["random_frac"],
            per_unit=hparams["replace_per_unit"],
            mask_id=mask_id,
            thresholds_V=thresholds_V,
        )
        weight = jnp.where(hparams["weight_by_rate"], 1 / rate, 1.0)
        is_first_L = is_hidden_L & (order.position_L == unit_L[order.position_L])
        length_L = jnp.clip(order.size_L, 1, MAX_UNIT) - 1
        lengths = jnp.zeros(MAX_UNIT, jnp.int32).at[length_L].add(is_first_L)
        ledger = {
            "num_maskable": is_maskable_L.sum(),
            "num_hidden": is_hidden_L.sum(),
            "num_overflow": overflow,
            "unit_lengths": lengths,
        }
        targets_M = jnp.where(is_used_M, tokens_L[predict_M], 0)
        weights_M = is_used_M * weight.astype(jnp.float32)
        row = {
            "inputs": inputs_L,
            "predict": predict_M,
            "targets": targets_M,
            "weights": weights_M,
            "unit": unit_L,
            "action": action_L,
        }
        return row, ledger

    def corrupt(key, batch, hparams, progress):
        batch = jax.tree.map(lambda x: jnp.repeat(x, views, axis=0), batch)
        view_B = jnp.arange(len(batch["row"])) % views
        # Static masks come again after some epochs; dynamic ones never do.
        epoch_B = batch["epoch"] % hparams["mask_period"]
        row_keys = keys.row_keys(key, epoch_B, batch["row"])
        rate = schedule.rate_at(progress, hparams)
        weight_V = weights.WEIGHTS[token_weights](counts_V, hparams)
        if weight_V is not None:
            weight_V = weight_V ** hparams["weight_power"]
        rows, ledger = jax.vmap(corrupt_row, in_axes=(0, 0, 0, 0, 0, None, None, None))(
            row_keys,
            view_B,
            batch["tokens"],
            batch["segment"],
            batch["word_start"],
            hparams,
            rate,
            weight_V,
        )
        action = rows["action"]
        ledger = {name: rows_B.sum(0) for name, rows_B in ledger.items()}
        ledger |= {
            "num_mask_tokens": jnp.sum(action == Action.MASK),
            "num_random_tokens": jnp.sum(action == Action.RANDOM),
            "num_kept_tokens": jnp.sum(action == Action.KEEP),
            "mask_hash": mask_hash(batch, rows["inputs"], action),
        }
        return batch | rows, ledger

    return corrupt


def mask_hash(batch, inputs_BxL, action_BxL):
    """Returns uint32, the same for the same masks in whatever order they are met.

    It covers row, position and what stands there, so that masks which come again in a
    later epoch hash as before.
    """
    length = inputs_BxL.shape[1]
    values = (
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
