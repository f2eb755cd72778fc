"""One training step and one evaluation step: pure functions of (state, batch).

Sums cross every boundary: rows, micro-batches, devices. Means are taken once, last.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from mlm_jax import collectives, keys, optim, spikes
from mlm_jax.corruption import weights
from mlm_jax.keys import Purpose
from mlm_jax.loss import masked_cross_entropy


def make_loss_fn(model, num_classes, *, train, per_token=False, is_partitioned=False):
    """Returns `loss_fn(params, corrupted batch, key) -> (objective sum, sums)`, which
    takes the settings of `masked_cross_entropy` by name. The sums are of bare losses.

    With `per_token` the sums have the losses by target, `token_losses` float32[V], and
    the predictions of each, `token_counts`.
    """

    def loss_fn(params, batch, key, **regularisers):
        dropout_keys = None
        if train:
            dropout_key = keys.purpose_key(key, Purpose.DROPOUT)
            dropout_keys = keys.row_keys(dropout_key, batch["epoch"], batch["row"])
        objective, predictions = _predict(
            model,
            params,
            batch,
            dropout_keys,
            num_classes=num_classes,
            is_partitioned=is_partitioned,
            **regularisers,
        )
        weights_N = batch["weights"].reshape(-1)
        is_used_BxM = batch["weights"] > 0
        sums = {
            "loss": jnp.sum(weights_N * predictions.losses_N),
            "num_correct": jnp.sum(weights_N * (predictions.ranks_N == 0)),
            "num_top5": jnp.sum(weights_N * (predictions.ranks_N < 5)),
            "weight": weights_N.sum(),
            "num_masked": is_used_BxM.sum(),
        }
        if per_token:
            targets_N = batch["targets"].reshape(-1)
            zeros_V = jnp.zeros_like(params["bias"])
            sums["token_losses"] = zeros_V.at[targets_N].add(predictions.losses_N)
            sums["token_counts"] = zeros_V.at[targets_N].add(is_used_BxM.reshape(-1))
        return objective, sums

    return loss_fn


def make_predict_fn(model, num_classes, *, is_partitioned=False):
    """Returns `predict(params, corrupted batch) -> loss.Predictions`, without dropout,
    each of shape [B, M] as the slots are."""

    def predict(params, batch):
        settings = {"num_classes": num_classes, "is_partitioned": is_partitioned}
        _, predictions = _predict(model, params, batch, None, **settings)
        shape = batch["predict"].shape
        return jax.tree.map(lambda x_N: x_N.reshape(shape), predictions)

    return predict


def _predict(model, params, batch, dropout_keys, **settings):
    hidden_BxMxD, table_VxD, bias_V = model.apply(
        {"params": params},
        batch["inputs"],
        batch["segment"],
        batch["position"],
        batch["predict"],
        dropout_keys,
    )
    return masked_cross_entropy(
        hidden_BxMxD.reshape(-1, hidden_BxMxD.shape[-1]),
        table_VxD,
        bias_V,
        batch["targets"].reshape(-1),
        batch["weights"].reshape(-1),
        **settings,
    )


def train_step(
    state,
    batch,
    *,
    corrupt,
    loss_fn,
    optimizer,
    schedule,
    axis=None,
    spread=None,
    num_microbatches=1,
):
    """Returns (new state, metrics).

    `schedule(update, hparams)` is the learning rate of an update, counted from 1.
    Metrics are sums over the global batch, and `learning_rate` and `grad_norm` (of the
    mean gradient, before clipping) of this update. Where the loss or the gradient norm
    is not finite, or a spike to a run that looks for them (`is_spike` in the metrics),
    the new state is the old one but for its step. The rows of `batch` are those of one
    device where `axis` is mapped already, or where `spread` maps what meets them.
    """

    def sum_over_rows(state, batch):
        key = keys.purpose_key(state.key, Purpose.CORRUPTION)
        progress = state.step / state.hparams["num_steps"]
        numbers = state.hparams | {"token_loss": state.token_loss}
        batch, sums = corrupt(key, batch, numbers, progress)
        sums["num_tokens"] = jnp.sum(batch["segment"] > 0)

        names = "label_smoothing", "z_loss"
        regularisers = {name: state.hparams[name] for name in names}
        params = collectives.varying(state.params, axis)
        grads, loss_sums = sum_grads(
            functools.partial(loss_fn, **regularisers),
            params,
            batch,
            state.key,
            num_microbatches,
        )
        return collectives.psum((grads, sums | loss_sums), axis)

    # The moments are no business of the rows, and may be in parts.
    without_moments = state.replace(opt_state=())
    over_rows = spread(sum_over_rows) if spread else sum_over_rows
    grads, sums = over_rows(without_moments, batch)

    # The mean is over every prediction of the global batch, so divide last. Mean and
    # clipping are one factor: each more would be a pass over all gradients.
    weight = jnp.where(sums["weight"] > 0, sums["weight"], 1)
    grad_norm = optax.tree.norm(grads) / weight
    factor = optim.clip_factor(grad_norm, state.hparams["clip_norm"]) / weight
    is_sound = jnp.isfinite(sums["loss"]) & jnp.isfinite(grad_norm)
    recent = state.recent
    if recent:
        seen = {"loss": sums["loss"] / weight, "grad_norm": grad_norm}
        is_spike = spikes.is_spike(recent, seen, state.hparams["spike_sigmas"])
        is_sound &= ~is_spike
        recent = spikes.remember(recent, seen)
        sums["is_spike"] = is_spike
    grads = jax.tree.map(lambda g: jnp.where(is_sound, g * factor, -0.0), grads)
    learning_rate = schedule(state.step + 1, state.hparams)
    transform = optimizer(learning_rate, optim.frozen_unless(is_sound, state.hparams))
    updates, opt_state = transform.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    token_loss = state.token_loss
    if "token_losses" in sums:
        by_token = sums.pop("token_losses"), sums.pop("token_counts")
        decay = state.hparams["token_loss_decay"]
        token_loss = weights.updated(token_loss, *by_token, decay)

    def chosen(new, old):
        return jax.tree.map(lambda n, o: jnp.where(is_sound, n, o), new, old)

    # Frozen moments did not move: to choose between two would keep both in memory.
    opt_state = jax.tree.map(
        lambda new, old: new if new.ndim else chosen(new, old),
        opt_state,
        state.opt_state,
    )
    params = chosen(params, state.params)
    token_loss = chosen(token_loss, state.token_loss)
    recent = chosen(recent, state.recent)
    metrics = sums | {
        "learning_rate": learning_rate,
        "grad_norm": grad_norm,
    }
    state = state.replace(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        token_loss=token_loss,
        recent=recent,
    )
    return state, metrics


def sum_grads(loss_fn, params, batch, key, num_microbatches):
    """Sums gradients and metrics over micro-batches; no collectives."""
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if num_microbatches == 1:
        return grad_fn(params, batch, key)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, grad_fn(params, micro, key)), None

    # Interleaved, so that every micro-batch spreads over every device.
    micros = jax.tree.map(
        lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch
    )
    first = jax.tree.map(lambda x: x[0], micros)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, params, first, key))
    total, _ = jax.lax.scan(add, zeros, micros)
    return total


def eval_step(params, batch, key, hparams, *, corrupt, loss_fn, axis=None):
    """Returns the sums of one batch, its masks drawn from `key` alone."""
    key = keys.purpose_key(key, Purpose.CORRUPTION)
    batch, sums = corrupt(key, batch, hparams, 0.0)
    _, loss_sums = loss_fn(params, batch, key)
    return collectives.psum(sums | loss_sums, axis)
