"""The fused masked cross-entropy.

    loss = sum_n weight_n * -log softmax(hidden_n @ table.T + bias)[target_n]

over the predicted positions, a chunk of them at a time. Neither pass holds more logits
than [chunk, V]: the gradients of `hidden`, `table` and `bias` are made together with
the loss while a chunk's logits are at hand, and the backward pass only scales them.

It returns sums. Whoever adds them over micro-batches, devices and processes divides
once, at the end.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

# Predictions per chunk. Memory is chunk x V x 4 bytes; below about 256 the matrix
# products get slower (128: 5%, 64: 27% of the head at D=256, V=30,522 on a CPU).
CHUNK = 256


def masked_cross_entropy(
    hidden_NxD, table_VxD, bias_V, targets_N, weights_N, *, num_classes, chunk=CHUNK
):
    """Returns (loss sum, (number of correct predictions, `losses_N`)), all float32.

    Loss and number are weighted; `losses_N` are the bare losses, 0 in unused slots.
    Only the loss sum has a gradient.

    A slot of weight 0 adds exactly 0 to the sums and to every gradient, whatever its
    target and its hidden vector. Weights are 0 or more and get no gradient. Columns of
    the table from `num_classes` on are padding: probability 0. Sums are float32 for any
    dtype of `hidden`. A prediction is correct if its target has the largest logit, the
    first one among equals.

    Under `checkify` a used slot with a target outside [0, num_classes) is an error.
    """
    is_used_N = weights_N > 0
    is_valid_N = (targets_N >= 0) & (targets_N < num_classes)
    checkify.debug_check(
        jnp.all(is_valid_N | ~is_used_N),
        f"a target with weight is outside [0, {num_classes})",
    )
    targets_N = jnp.where(is_used_N, targets_N, 0)
    hidden_NxD = jnp.where(is_used_N[:, None], hidden_NxD, 0)
    return _sums(
        hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes, chunk
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _sums(hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes, chunk):
    def add(sums, slots):
        new_sums, losses_C, _ = _chunk(slots, table, bias_V, num_classes)
        return jax.tree.map(jnp.add, sums, new_sums), losses_C

    table = table_VxD.astype(hidden_NxD.dtype)
    chunks = _split(hidden_NxD, targets_N, weights_N, chunk)
    zero = jnp.zeros_like(weights_N, shape=())
    (loss, num_correct), losses = lax.scan(add, (zero, zero), chunks)
    return loss, (num_correct, losses.reshape(-1)[: len(targets_N)])


def _sums_forward(
    hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes, chunk
):
    table = table_VxD.astype(hidden_NxD.dtype)

    def add(carry, slots):
        sums, d_table_VxD, d_bias_V = carry
        hidden_CxD = slots[0]
        new_sums, losses_C, d_logits_CxV = _chunk(slots, table, bias_V, num_classes)
        d_bias_V = d_bias_V + d_logits_CxV.sum(0)
        d_logits_CxV = d_logits_CxV.astype(hidden_CxD.dtype)
        d_hidden_CxD = d_logits_CxV @ table
        d_table_VxD = d_table_VxD + _dot(d_logits_CxV, hidden_CxD, contract=(0, 0))
        sums = jax.tree.map(jnp.add, sums, new_sums)
        return (sums, d_table_VxD, d_bias_V), (d_hidden_CxD, losses_C)

    chunks = _split(hidden_NxD, targets_N, weights_N, chunk)
    # zeros_like, not zeros: under shard_map it is as per-device as its model.
    zero = jnp.zeros_like(weights_N, shape=())
    zeros = jnp.zeros_like(table_VxD), jnp.zeros_like(bias_V)
    carry, per_chunk = lax.scan(add, ((zero, zero), *zeros), chunks)
    (loss, num_correct), *d_shared = carry
    d_hidden, losses = per_chunk
    d_hidden_NxD = d_hidden.reshape(-1, hidden_NxD.shape[1])[: len(hidden_NxD)]
    losses_N = losses.reshape(-1)[: len(targets_N)]
    return (loss, (num_correct, losses_N)), (d_hidden_NxD, *d_shared)


def _sums_backward(num_classes, chunk, gradients, cotangents):
    d_loss, _ = cotangents
    d_hidden_NxD, d_table_VxD, d_bias_V = gradients
    d_hidden_NxD = d_hidden_NxD * d_loss.astype(d_hidden_NxD.dtype)
    return d_hidden_NxD, d_table_VxD * d_loss, d_bias_V * d_loss, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _chunk(slots, table_VxD, bias_V, num_classes):
    """Returns ((loss, correct), losses, d loss / d logits) of one chunk."""
    hidden_CxD, targets_C, weights_C = slots
    logits_CxV = _dot(hidden_CxD, table_VxD, contract=(1, 1)) + bias_V[None]
    column_CxV = lax.broadcasted_iota(jnp.int32, logits_CxV.shape, 1)
    if num_classes < logits_CxV.shape[1]:
        logits_CxV = jnp.where(column_CxV < num_classes, logits_CxV, -jnp.inf)
    is_target_CxV = column_CxV == targets_C[:, None]

    max_C = logits_CxV.max(1)
    log_z_C = max_C + jnp.log(jnp.exp(logits_CxV - max_C[:, None]).sum(1))
    target_logit_C = jnp.take_along_axis(logits_CxV, targets_C[:, None], 1)[:, 0]
    losses_C = jnp.where(weights_C > 0, log_z_C - target_logit_C, 0)
    is_correct_C = jnp.argmax(logits_CxV, 1) == targets_C

    p_CxV = jnp.exp(logits_CxV - log_z_C[:, None])
    d_logits_CxV = weights_C[:, None] * (p_CxV - is_target_CxV)
    sums = jnp.sum(weights_C * losses_C), jnp.sum(weights_C * is_correct_C)
    return sums, losses_C, d_logits_CxV


def _split(hidden_NxD, targets_N, weights_N, chunk):
    """Stacks equal chunks of at most `chunk` slots, filled up with weight 0."""
    num_slots = len(targets_N)
    num_chunks = -(-num_slots // chunk)
    chunk = -(-num_slots // num_chunks)

    def stack(x):
        padding = [(0, num_chunks * chunk - num_slots)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(num_chunks, chunk, *x.shape[1:])

    return stack(hidden_NxD), stack(targets_N), stack(weights_N)


def _dot(a, b, contract):
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
