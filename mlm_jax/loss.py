"""The fused masked cross-entropy.

    loss = sum_n weight_n * -log softmax(hidden_n @ table.T + bias)[target_n]

over the predicted positions, a chunk of them at a time, so that the logits are never
whole. The gradients of `hidden`, `table` and `bias` are made together with the loss,
while a chunk's logits are at hand, and the backward pass only scales them: to make the
logits again there would take 1.2 times as long on a CPU.

It returns sums. Whoever adds them over micro-batches, devices and processes divides
once, at the end.

`loss_xla` has the two passes over a chunk's logits in plain operations, `loss_tpu` as
kernels for a TPU; this module has all the rest.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlm_jax import loss_tpu, loss_xla


class Predictions(NamedTuple):
    """What became of each slot; none of it has a gradient.

    `losses_N` float32 are the bare losses, whatever the regularisers, and 0 in unused
    slots. `ranks_N` int32 count the classes that come before the target: those of a
    larger logit, and those of an equal one and a smaller index. So a prediction is
    correct where its rank is 0 and among the best k where it is below k. Unused slots
    have the rank `num_classes`, which no target has. `top_losses_N` float32 are -log p
    of the most probable class, whatever the target: how sure the model is.
    """

    losses_N: jax.Array
    ranks_N: jax.Array
    top_losses_N: jax.Array


def masked_cross_entropy(
    hidden_NxD,
    table_VxD,
    bias_V,
    targets_N,
    weights_N,
    *,
    num_classes,
    label_smoothing=0.0,
    z_loss=0.0,
    is_partitioned=False,
    chunk=None,
):
    """Returns (objective, `Predictions`). Only the objective has a gradient.

        objective = sum_n weight_n * (
            (1 - label_smoothing) * loss_n
            + label_smoothing * mean over the classes of -log p_n
            + z_loss * log(z_n)**2
        )

    with z_n the sum of exp(logit) (Szegedy et al. 2016, section 7; Chowdhery et al.
    2022, section 5). Both may be traced, so that a sweep compiles once, and always are:
    it costs nothing that could be measured while they are 0.

    A slot of weight 0 adds exactly 0 to the objective and to every gradient, whatever
    its target and its hidden vector. Weights are 0 or more and get no gradient. Columns
    of the table from `num_classes` on are padding: probability 0, and no share in the
    smoothing. Sums are float32 for any dtype of `hidden`.

    `is_partitioned` says that the compiler divides the program over several devices
    (`jit` of sharded arrays), which it can do with plain operations only. `chunk` is
    the number of slots at a time, by default the platform's own.

    A used slot with a target outside [0, num_classes) makes the objective NaN, which
    ends a training run: never another class's loss. (A `checkify` check would do, were
    its effect not to keep every call of the step off jax's fast dispatch.)
    """
    is_used_N = weights_N > 0
    is_valid_N = (targets_N >= 0) & (targets_N < num_classes)
    nan_if_wrong_N = jnp.where(is_valid_N | ~is_used_N, 0, jnp.nan)
    weights_N += nan_if_wrong_N
    slots = hidden_NxD, jnp.where(is_used_N, targets_N, 0), weights_N
    settings = Settings(num_classes, is_partitioned, chunk)
    regularisers = jnp.float32(label_smoothing), jnp.float32(z_loss)
    objective, losses_N, ranks_N, top_losses_N = _objective(
        slots, table_VxD, bias_V, regularisers, settings
    )
    losses_N = jnp.where(is_used_N, losses_N + nan_if_wrong_N, 0)
    ranks_N = jnp.where(is_used_N, ranks_N, num_classes)
    top_losses_N = jnp.where(is_used_N, top_losses_N, 0)
    return objective, Predictions(losses_N, ranks_N, top_losses_N)


class Settings(NamedTuple):
    num_classes: int
    is_partitioned: bool
    chunk: int | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _objective(slots, table_VxD, bias_V, regularisers, settings):
    return _on_platform(_value, slots, table_VxD, bias_V, regularisers, settings)


def _objective_forward(slots, table_VxD, bias_V, regularisers, settings):
    return _on_platform(
        _value_and_gradients, slots, table_VxD, bias_V, regularisers, settings
    )


def _objective_backward(settings, gradients, cotangents):
    d_objective, *_ = cotangents
    d_hidden_NxD, d_table_VxD, d_bias_V = gradients
    d_hidden_NxD = d_hidden_NxD * d_objective.astype(d_hidden_NxD.dtype)
    d_slots = d_hidden_NxD, None, None
    return d_slots, d_table_VxD * d_objective, d_bias_V * d_objective, None


_objective.defvjp(_objective_forward, _objective_backward)


def _on_platform(make, slots, table_VxD, bias_V, regularisers, settings):
    def by(passes):
        chunk = settings.chunk or passes.chunk_size(*table_VxD.shape)
        return functools.partial(make, passes, settings.num_classes, chunk)

    arguments = slots, table_VxD, bias_V, regularisers
    if settings.is_partitioned:
        return by(loss_xla)(*arguments)
    return lax.platform_dependent(*arguments, tpu=by(loss_tpu), default=by(loss_xla))


def _value(passes, num_classes, chunk, slots, table_VxD, bias_V, regularisers):
    """Returns objective, losses_N, ranks_N, top_losses_N."""
    output = _output(slots, table_VxD, bias_V, num_classes)

    def add(objective, slots):
        terms, _ = _terms(passes, slots, output, regularisers)
        return objective + terms.objective, terms.per_slot

    weights_N = slots[2]
    zero = jnp.zeros_like(weights_N, shape=())
    objective, per_slot = lax.scan(add, zero, _split(slots, chunk, passes.MULTIPLE))
    return objective, *_join(per_slot, len(weights_N))


def _value_and_gradients(
    passes, num_classes, chunk, slots, table_VxD, bias_V, regularisers
):
    """Returns what `_value` does, and the gradients of hidden, table and bias."""
    smoothing, _ = regularisers
    hidden_NxD, _, weights_N = slots
    output = _output(slots, table_VxD, bias_V, num_classes)

    def add(carry, slots):
        objective, d_table_VxD, d_bias_V = carry
        hidden_CxD, targets_C, weights_C = slots
        terms, kept = _terms(passes, slots, output, regularisers)
        d_hidden_CxD, d_table_VxD, d_bias_V = passes.accumulate(
            kept,
            _used(hidden_CxD, weights_C),
            targets_C,
            output.table_VxD,
            output.bias_V,
            terms.scale_C,
            terms.d_target_C,
            d_table_VxD,
            d_bias_V,
        )
        d_hidden_CxD -= smoothing * weights_C[:, None] * output.mean_table_D[None]
        d_hidden_CxD = d_hidden_CxD.astype(hidden_CxD.dtype)
        carry = objective + terms.objective, d_table_VxD, d_bias_V
        return carry, (*terms.per_slot, d_hidden_CxD)

    # The smoothed part of d logits is the same in every class and no chunk's own.
    share_V = jnp.where(_is_class(bias_V, num_classes), smoothing / num_classes, 0)
    hidden_D = (weights_N[:, None] * _used(hidden_NxD, weights_N)).sum(0)

    def smoothed(d_table_VxD, d_bias_V):
        d_table_VxD = d_table_VxD - share_V[:, None] * hidden_D[None]
        return d_table_VxD, d_bias_V - share_V * weights_N.sum()

    # zeros_like, not zeros: under shard_map it is as per-device as its model.
    zero = jnp.zeros_like(weights_N, shape=())
    chunks = _split(slots, chunk, passes.MULTIPLE)
    if len(chunks[2]) == 1:
        # Of a single chunk the gradients are what the products are: sums from zero
        # would be another pass over the table, and so is the smoothed part if any.
        chunk = jax.tree.map(lambda x: x[0], chunks)
        (objective, *d_output), per_slot = add((zero, None, None), chunk)
        per_slot = jax.tree.map(lambda x: x[None], per_slot)
        d_output = lax.cond(smoothing > 0, smoothed, lambda *same: same, *d_output)
    else:
        start = smoothed(jnp.zeros_like(table_VxD), jnp.zeros_like(bias_V))
        (objective, *d_output), per_slot = lax.scan(add, (zero, *start), chunks)
    *per_slot, d_hidden_NxD = _join(per_slot, len(weights_N))
    return (objective, *per_slot), (d_hidden_NxD, *d_output)


class Output(NamedTuple):
    """The output layer in the dtype of the matrix products, and its class means."""

    table_VxD: jax.Array
    bias_V: jax.Array  # -inf in the padding: probability 0, and before no class
    mean_table_D: jax.Array
    mean_bias: jax.Array


def _output(slots, table_VxD, bias_V, num_classes):
    table_VxD = table_VxD.astype(slots[0].dtype)
    is_class_V = _is_class(bias_V, num_classes)
    # A product, not the mean of a slice: where V is in parts, a slice would move rows
    # between devices, and on a CPU it would be another table.
    total_D = jnp.matmul(
        is_class_V.astype(table_VxD.dtype),
        table_VxD,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return Output(
        table_VxD,
        jnp.where(is_class_V, bias_V, -jnp.inf),
        total_D / num_classes,
        bias_V.mean(where=is_class_V),
    )


class Terms(NamedTuple):
    """Of one chunk: d objective / d logit is scale * exp(logit - max), at the target
    `d_target`, less smoothing * weight / num_classes in every class."""

    objective: jax.Array
    per_slot: tuple[jax.Array, ...]  # losses_C, ranks_C, top_losses_C
    scale_C: jax.Array
    d_target_C: jax.Array


def _terms(passes, slots, output, regularisers):
    """Returns `Terms`, and what `passes.accumulate` needs of the logits."""
    smoothing, z_loss = regularisers
    hidden_CxD, targets_C, weights_C = slots
    hidden_CxD = _used(hidden_CxD, weights_C)
    scores, kept = passes.score(hidden_CxD, targets_C, output.table_VxD, output.bias_V)
    # Small losses keep their digits, and their gradients: others / total is 1 - p, and
    # log1p of it -log p, where 1 - p itself would have none left.
    max_C, others_C, target_C, ranks_C = scores
    share_C = jnp.exp(target_C - max_C)
    total_C = others_C + share_C
    log_total_C = jnp.log1p(others_C + (share_C - 1))
    losses_C = max_C - target_C + log_total_C
    log_z_C = max_C + log_total_C
    mean_logit_C = (hidden_CxD * output.mean_table_D[None]).sum(1) + output.mean_bias

    objective_C = (1 - smoothing) * losses_C
    objective_C += smoothing * (log_z_C - mean_logit_C) + z_loss * log_z_C**2
    pull_C = 2 * z_loss * log_z_C
    scale_C = weights_C * (1 + pull_C) / total_C
    d_target_C = smoothing + (pull_C * share_C - others_C) / total_C
    objective = jnp.sum(weights_C * objective_C)
    per_slot = losses_C, ranks_C, log_total_C
    terms = Terms(objective, per_slot, scale_C, weights_C * d_target_C)
    return terms, kept


def _used(hidden_CxD, weights_C):
    return jnp.where(weights_C[:, None] > 0, hidden_CxD, 0)


def _is_class(bias_V, num_classes):
    return jnp.arange(len(bias_V)) < num_classes


def _split(slots, chunk, multiple):
    """Stacks equal chunks of at most about `chunk` slots, filled up with weight 0.

    Of up to a quarter more chunks than that takes, those that need no filling up: it
    would copy every hidden vector.
    """
    num_slots = len(slots[0])
    fewest = -(-num_slots // chunk)
    counts = range(fewest, fewest * 5 // 4 + 1)
    even = (n for n in counts if num_slots % (n * multiple) == 0)
    num_chunks = next(even, fewest)
    chunk = -(-num_slots // (num_chunks * multiple)) * multiple

    def stack(x):
        padding = [(0, num_chunks * chunk - num_slots)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(num_chunks, chunk, *x.shape[1:])

    return jax.tree.map(stack, slots)


def _join(chunks, num_slots):
    """Undoes `_split`."""
    return [x.reshape(-1, *x.shape[2:])[:num_slots] for x in chunks]
