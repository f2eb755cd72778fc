"""Measures the loss head, forward and backward, against heads that keep all logits.

    python -m mlm_jax.benchmark --vocab_size=30522 --width=256

Three heads give the same loss and the same gradients, from the encoder's output on:

    full      logits at every position, [B, L, V], the unpredicted ones weighted 0
    gathered  logits at the predicted positions, [N, V], at once
    fused     ours: a chunk of the predicted positions at a time

They run in turn within one process. Prints a JSON line for each: the least time of a
call, the temporary memory of the compiled program, and both as a multiple of `fused`.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from mlm_jax import command
from mlm_jax.loss import masked_cross_entropy

BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Rows.", lower_bound=1)
ROW_LENGTH = flags.DEFINE_integer("row_length", 128, "Tokens in a row.", lower_bound=8)
WIDTH = flags.DEFINE_integer("width", 256, "Width of the encoder.", lower_bound=1)
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 30522, "Vocabulary.", lower_bound=8)
RATE = flags.DEFINE_float(
    "rate", 0.15, "Share predicted.", lower_bound=0, upper_bound=1
)
ROUNDS = flags.DEFINE_integer("rounds", 10, "Times each head runs.", lower_bound=2)


def full_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    logits_BxLxV = x_BxLxD @ table_VxD.T + bias_V[None, None]
    loss_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, tokens_BxL)
    rows = jnp.arange(len(predict_BxM))[:, None]
    weight_BxL = jnp.zeros_like(loss_BxL).at[rows, predict_BxM].set(1)
    return jnp.sum(loss_BxL * weight_BxL)


def gathered_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    hidden_NxD, targets_N = gather(x_BxLxD, tokens_BxL, predict_BxM)
    logits_NxV = hidden_NxD @ table_VxD.T + bias_V[None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_NxV, targets_N)
    return losses.sum()


def fused_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    hidden_NxD, targets_N = gather(x_BxLxD, tokens_BxL, predict_BxM)
    weights_N = jnp.ones_like(targets_N, jnp.float32)
    loss, _ = masked_cross_entropy(
        hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes=len(bias_V)
    )
    return loss


def gather(x_BxLxD, tokens_BxL, predict_BxM):
    x_BxMxD = jnp.take_along_axis(x_BxLxD, predict_BxM[:, :, None], axis=1)
    targets_BxM = jnp.take_along_axis(tokens_BxL, predict_BxM, axis=1)
    return x_BxMxD.reshape(-1, x_BxLxD.shape[-1]), targets_BxM.reshape(-1)


HEADS = {"full": full_loss, "gathered": gathered_loss, "fused": fused_loss}


def make_inputs(batch_size, row_length, width, vocab_size, rate, seed=0):
    """Returns random arguments of a head, equally many predictions in each row."""
    rng = np.random.default_rng(seed)
    num_slots = max(1, round(rate * row_length))
    order_BxL = rng.permuted(np.tile(np.arange(row_length), (batch_size, 1)), axis=1)
    return (
        jnp.asarray(rng.normal(size=(batch_size, row_length, width)), jnp.float32),
        jnp.asarray(0.02 * rng.normal(size=(vocab_size, width)), jnp.float32),
        jnp.zeros(vocab_size),
        jnp.asarray(rng.integers(0, vocab_size, (batch_size, row_length)), jnp.int32),
        jnp.asarray(order_BxL[:, :num_slots], jnp.int32),
    )


def compile_heads(inputs):
    """Returns {name: compiled (loss, gradients)}."""
    return {
        name: jax.jit(jax.value_and_grad(head, (0, 1, 2))).lower(*inputs).compile()
        for name, head in HEADS.items()
    }


def temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def measure(heads, inputs, rounds):
    """Returns {name: least seconds}; heads take turns, after one call unmeasured."""
    seconds: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(rounds + 1):
        for name, head in heads.items():
            begin = time.perf_counter()
            jax.block_until_ready(head(*inputs))
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(times[1:]) for name, times in seconds.items()}


def main(arguments):
    del arguments
    inputs = make_inputs(
        BATCH_SIZE.value, ROW_LENGTH.value, WIDTH.value, VOCAB_SIZE.value, RATE.value
    )
    heads = compile_heads(inputs)
    seconds = measure(heads, inputs, ROUNDS.value)
    memory = {name: temporary_bytes(head) for name, head in heads.items()}
    for name in heads:
        line = {
            "head": name,
            "ms": round(seconds[name] * 1e3, 1),
            "temporary_mb": round(memory[name] / 2**20, 1),
            "times_fused_ms": round(seconds[name] / seconds["fused"], 2),
            "times_fused_mb": round(memory[name] / memory["fused"], 2),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    command.run(main)
