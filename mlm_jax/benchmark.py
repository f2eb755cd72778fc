"""Measures one part of a step against what it is compared with, in turn in one process.

    python -m mlm_jax.benchmark --part=loss_head --vocab_size=30522 --width=256
    python -m mlm_jax.benchmark --part=corruption --vocab_size=8192

`loss_head`: three heads that give the same loss and the same gradients, from the
encoder's output on.

    full      logits at every position, [B, L, V], the unpredicted ones weighted 0
    gathered  logits at the predicted positions, [N, V], at once
    fused     ours: a chunk of the predicted positions at a time

`corruption`: each strategy alone, against the training step of a BERT-mini (4 layers of
width 256) on the same rows.

Prints a JSON line for each, with the least time of a call and its ratio; for the heads
also the temporary memory of the compiled program.
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from configs import base
from mlm_jax import command, config, parallel, program
from mlm_jax.corruption import collocations, settings, units
from mlm_jax.data.tokenizer import SpecialIds
from mlm_jax.loss import masked_cross_entropy

PART = flags.DEFINE_enum("part", "loss_head", ["loss_head", "corruption"], "What.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Rows.", lower_bound=1)
ROW_LENGTH = flags.DEFINE_integer("row_length", 128, "Tokens in a row.", lower_bound=8)
WIDTH = flags.DEFINE_integer("width", 256, "Width of the encoder.", lower_bound=1)
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 30522, "Vocabulary.", lower_bound=8)
RATE = flags.DEFINE_float(
    "rate", 0.15, "Share predicted.", lower_bound=0, upper_bound=1
)
NUM_COLLOCATIONS = 10_000  # about what six novels have
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


def loss_head():
    inputs = make_inputs(
        BATCH_SIZE.value, ROW_LENGTH.value, WIDTH.value, VOCAB_SIZE.value, RATE.value
    )
    heads = compile_heads(inputs)
    seconds = measure(heads, inputs, ROUNDS.value)
    memory = {name: temporary_bytes(head) for name, head in heads.items()}
    for name in heads:
        yield {
            "head": name,
            "ms": round(seconds[name] * 1e3, 1),
            "temporary_mb": round(memory[name] / 2**20, 1),
            "times_fused_ms": round(seconds[name] / seconds["fused"], 2),
            "times_fused_mb": round(memory[name] / memory["fused"], 2),
        }


class Vocabulary:
    """As much of a tokenizer as a program needs."""

    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.is_special = np.arange(vocab_size) < len(self.special)


def mini(vocab_size):
    """Returns the config of a BERT-mini."""
    c = base.get_config()
    c.model.update(num_layers=4, width=256, num_heads=4, mlp_width=1024)
    c.data.update(row_length=ROW_LENGTH.value, batch_size=BATCH_SIZE.value)
    c.corruption.rate = RATE.value
    c.tokenizer.vocab_size = vocab_size
    return c


def random_batch(batch_size, row_length, vocab_size, seed=0):
    """Returns full rows of one segment, four words in five a single token."""
    rng = np.random.default_rng(seed)
    shape = batch_size, row_length
    tokens_BxL = rng.integers(5, vocab_size, shape, dtype=np.int32)
    tokens_BxL[:, 0], tokens_BxL[:, -1] = 2, 3
    return {
        "tokens": tokens_BxL,
        "segment": np.ones(shape, np.int32),
        "position": np.tile(np.arange(row_length, dtype=np.int32), (batch_size, 1)),
        "word_start": rng.random(shape) < 0.8,
        "row": np.arange(batch_size, dtype=np.int32),
        "epoch": np.zeros(batch_size, np.int32),
    }


def corruption():
    vocabulary = Vocabulary(VOCAB_SIZE.value)
    counts_V = np.ones(VOCAB_SIZE.value)
    c = mini(VOCAB_SIZE.value)
    mesh = parallel.make_mesh({"data": 1})
    built = program.make_program(c, vocabulary, counts_V, mesh)
    batch = random_batch(BATCH_SIZE.value, ROW_LENGTH.value, VOCAB_SIZE.value)
    state = built.init(jax.random.key(0), config.hparams(c))

    def step():
        nonlocal state
        state, metrics = built.train_step(state, batch)
        return metrics

    calls = {"step": step}
    hashes_N = np.random.default_rng(0).integers(0, 2**64, NUM_COLLOCATIONS, np.uint64)
    for strategy in units.STRATEGIES:
        c.corruption.strategy = strategy
        found = collocations.from_hashes(hashes_N) if strategy == "pmi" else None
        corrupt = jax.jit(
            program.corrupt_of(c, vocabulary, counts_V, c.corruption, found)
        )
        arguments = jax.device_put(
            (jax.random.key(0), batch, settings.hparams(c.corruption), 0.0)
        )
        calls[strategy] = functools.partial(corrupt, *arguments)
    seconds = measure(calls, (), ROUNDS.value)
    for name in calls:
        yield {
            "part": name,
            "ms": round(seconds[name] * 1e3, 2),
            "share_of_step": round(seconds[name] / seconds["step"], 4),
        }


PARTS = {"loss_head": loss_head, "corruption": corruption}


def main(arguments):
    del arguments
    for line in PARTS[PART.value]():
        print(json.dumps(line))


if __name__ == "__main__":
    command.run(main)
