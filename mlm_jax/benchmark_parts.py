"""The parts of a training step, and rival ways to do them, measured in turn."""

import functools
import importlib.resources
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlm_jax import optim, population, program
from mlm_jax.corruption import collocations, settings, units
from mlm_jax.data import pipeline, rows
from mlm_jax.loss import masked_cross_entropy

NUM_COLLOCATIONS = 10_000  # about what six novels have


def measure(calls, rounds):
    """Returns {name: seconds of each round}; calls take turns, after one round
    unmeasured. Each returns what is to be waited for."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def matrix_product(dtype, size=1024):
    """Returns (a call that multiplies two square matrices, its operations)."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    return lambda: product(x, x), 2 * size**3


def temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


# ---- the parts of a step ------------------------------------------------------------


def breakdown(bench, rounds):
    """Yields each part's time alone, as a share of the step's.

    `encoder` is the forward and backward pass up to the head's vectors, `loss` that of
    the rest, `input` reading a batch of rows (beside the step, on a thread). `host` is
    what the main thread is busy with in a training loop, and `input_wait` what it waits
    for rows.
    """
    batches = austen_batches(bench)
    calls = {
        "step": bench.step,
        "corruption": corruption_call(bench, bench.config.corruption, None),
        "encoder": encoder_call(bench),
        "loss": loss_call(bench),
        "optimizer": optimizer_call(bench),
        "input": functools.partial(batches.__getitem__, 1),
    }
    seconds = {name: min(times) for name, times in measure(calls, rounds).items()}
    seconds |= loop_times(bench, batches, rounds)
    for name, value in seconds.items():
        share = value / seconds["step"]
        yield {"part": name, "ms": round(value * 1e3, 2), "share": round(share, 4)}


def corruption_call(bench, corruption, found):
    corrupt = jax.jit(
        program.corrupt_of(
            bench.config, bench.vocabulary, bench.counts_V, corruption, found
        )
    )
    numbers = settings.hparams(corruption)
    return functools.partial(
        corrupt, *jax.device_put((jax.random.key(0), bench.batch, numbers, 0.0))
    )


def head_inputs(bench, seed=0):
    """Returns random arguments of `fused_loss` for the predictions of a batch."""
    preset, rng = bench.preset, np.random.default_rng(seed)
    num_slots = preset.batch_size * bench.predictions_per_row
    shape = num_slots, preset.width
    return (
        jnp.asarray(rng.normal(size=shape), bench.config.model.dtype),
        jnp.asarray(0.02 * rng.normal(size=(preset.vocab_size, preset.width)), "f4"),
        jnp.zeros(preset.vocab_size),
        jnp.asarray(rng.integers(0, preset.vocab_size, num_slots), jnp.int32),
        jnp.ones(num_slots),
    )


def encoder_call(bench):
    preset, batch = bench.preset, bench.batch
    rows_B = np.arange(preset.batch_size)
    predict_BxM = np.tile(np.arange(bench.predictions_per_row), (len(rows_B), 1))
    keys_B = jax.vmap(jax.random.key)(rows_B)

    def total(params, keys_B):
        arrays = batch["tokens"], batch["segment"], batch["position"]
        hidden_BxMxD, _, _ = bench.program.model.apply(
            {"params": params}, *arrays, predict_BxM, keys_B
        )
        return jnp.sum(hidden_BxMxD.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(total))
    return lambda: gradient(bench.state.params, keys_B)


def loss_call(bench):
    inputs = head_inputs(bench)
    gradient = jax.jit(jax.grad(fused_loss, (0, 1, 2)))
    return lambda: gradient(*inputs)


def optimizer_call(bench):
    optimizer = optim.OPTIMIZERS[bench.config.optim.name]

    @jax.jit
    def update(state, grads):
        factor = optim.clip_factor(optax.tree.norm(grads), state.hparams["clip_norm"])
        grads = jax.tree.map(lambda g: g * factor, grads)
        transform = optimizer(1e-4, state.hparams)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    grads = jax.tree.map(jnp.ones_like, bench.state.params)
    return lambda: update(bench.state, grads)


def austen_batches(bench, **data):
    """Returns batches of the bundled novels in the shape of the benchmark's."""
    c = bench.config.copy_and_resolve_references()
    c.tokenizer.vocab_size = min(c.tokenizer.vocab_size, 8192)
    c.data.update(data)
    store = rows.prepare(c.data, c.tokenizer, log=lambda line: None)
    return pipeline.TrainBatches(store.train, batch_size=c.data.batch_size, seed=0)


def loop_times(bench, batches, num_steps):
    """Returns the mean seconds a step that a training loop's main thread works and
    waits for rows, with the metrics fetched one step late."""
    host = wait = 0.0
    pending = None
    ahead = pipeline.prefetch(batches, 0, num_steps)
    for _ in range(num_steps):
        begin = time.perf_counter()
        batch = next(ahead)
        ready = time.perf_counter()
        bench.state, metrics = bench.compiled(bench.state, batch)
        wait += ready - begin
        host += time.perf_counter() - ready
        if pending is not None:
            jax.device_get(pending)
        pending = metrics
    return {"host": host / num_steps, "input_wait": wait / num_steps}


# ---- rivals -------------------------------------------------------------------------


def full_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    """Logits at every position, [B, L, V], the unpredicted ones weighted 0."""
    logits_BxLxV = x_BxLxD @ table_VxD.T + bias_V[None, None]
    loss_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, tokens_BxL)
    rows_Bx1 = jnp.arange(len(predict_BxM))[:, None]
    weight_BxL = jnp.zeros_like(loss_BxL).at[rows_Bx1, predict_BxM].set(1)
    return jnp.sum(loss_BxL * weight_BxL)


def gathered_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    """Logits at the predicted positions, [N, V], at once."""
    hidden_NxD, targets_N = gather(x_BxLxD, tokens_BxL, predict_BxM)
    logits_NxV = hidden_NxD @ table_VxD.T + bias_V[None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_NxV, targets_N)
    return losses.sum()


def chunked_loss(x_BxLxD, table_VxD, bias_V, tokens_BxL, predict_BxM):
    """Ours: a chunk of the predicted positions at a time."""
    hidden_NxD, targets_N = gather(x_BxLxD, tokens_BxL, predict_BxM)
    weights_N = jnp.ones_like(targets_N, jnp.float32)
    return fused_loss(hidden_NxD, table_VxD, bias_V, targets_N, weights_N)


def fused_loss(hidden_NxD, table_VxD, bias_V, targets_N, weights_N):
    loss, _ = masked_cross_entropy(
        hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes=len(bias_V)
    )
    return loss


def gather(x_BxLxD, tokens_BxL, predict_BxM):
    x_BxMxD = jnp.take_along_axis(x_BxLxD, predict_BxM[:, :, None], axis=1)
    targets_BxM = jnp.take_along_axis(tokens_BxL, predict_BxM, axis=1)
    return x_BxMxD.reshape(-1, x_BxLxD.shape[-1]), targets_BxM.reshape(-1)


HEADS = {"full": full_loss, "gathered": gathered_loss, "fused": chunked_loss}


def compile_heads(bench, seed=0):
    """Returns {name: compiled (loss, gradients)} and their arguments: the encoder's
    output, the table, the bias, the tokens, and which of them are predicted."""
    preset, rng = bench.preset, np.random.default_rng(seed)
    shape = preset.batch_size, preset.row_length
    order_BxL = rng.permuted(np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1)
    inputs = (
        jnp.asarray(rng.normal(size=(*shape, preset.width)), jnp.float32),
        jnp.asarray(0.02 * rng.normal(size=(preset.vocab_size, preset.width)), "f4"),
        jnp.zeros(preset.vocab_size),
        jnp.asarray(rng.integers(0, preset.vocab_size, shape), jnp.int32),
        jnp.asarray(order_BxL[:, : bench.predictions_per_row], jnp.int32),
    )
    compiled = {
        name: jax.jit(jax.value_and_grad(head, (0, 1, 2))).lower(*inputs).compile()
        for name, head in HEADS.items()
    }
    return compiled, inputs


def loss_heads(bench, rounds):
    """Yields the time and temporary memory of three heads that give the same loss and
    the same gradients, from the encoder's output on."""
    heads, inputs = compile_heads(bench)
    calls = {name: functools.partial(head, *inputs) for name, head in heads.items()}
    seconds = {name: min(times) for name, times in measure(calls, rounds).items()}
    memory = {name: temporary_bytes(head) for name, head in heads.items()}
    for name in heads:
        yield {
            "head": name,
            "ms": round(seconds[name] * 1e3, 1),
            "temporary_mb": round(memory[name] / 2**20, 1),
            "times_fused_ms": round(seconds[name] / seconds["fused"], 2),
            "times_fused_mb": round(memory[name] / memory["fused"], 2),
        }


def corruption(bench, rounds):
    """Yields the time of each strategy alone, as a share of the step's."""
    calls = {"step": bench.step}
    hashes_N = np.random.default_rng(0).integers(0, 2**64, NUM_COLLOCATIONS, np.uint64)
    c = bench.config.corruption.copy_and_resolve_references()
    for strategy in units.STRATEGIES:
        c.strategy = strategy
        found = collocations.from_hashes(hashes_N) if strategy == "pmi" else None
        calls[strategy] = corruption_call(bench, c, found)
    seconds = {name: min(times) for name, times in measure(calls, rounds).items()}
    for name, value in seconds.items():
        share = value / seconds["step"]
        yield {
            "part": name,
            "ms": round(value * 1e3, 2),
            "share_of_step": round(share, 4),
        }


def packing(bench, rounds):
    """Yields what rows of several paragraphs save against one paragraph a row, filled
    up with padding: the paragraphs of the bundled novels, a step on rows of each.

    `fill` is the share of positions that hold a token, and `times_packed` the time for
    an epoch over that of packed rows.
    """
    novels = importlib.resources.files("mlm_jax.data") / "austen" / "*.txt"
    paragraphs = {"source": f"files:{novels}", "document": "blank_line"}
    batches = {
        way: austen_batches(bench, packing=way, **paragraphs)
        for way in ("single", "packed")
    }

    def step(batch):
        bench.state, metrics = bench.compiled(bench.state, batch)
        return metrics

    calls = {way: functools.partial(step, batches[way][0]) for way in batches}
    seconds = {name: min(times) for name, times in measure(calls, rounds).items()}
    num_steps = {
        way: found.num_rows / bench.preset.batch_size for way, found in batches.items()
    }
    for way, found in batches.items():
        epoch = seconds[way] * num_steps[way]
        times_packed = epoch / (seconds["packed"] * num_steps["packed"])
        yield {
            "rows": way,
            "steps_in_epoch": round(num_steps[way]),
            "fill": round(float(np.mean(found[0]["segment"] > 0)), 3),
            "step_ms": round(seconds[way] * 1e3, 2),
            "epoch_s": round(epoch, 1),
            "times_packed": round(times_packed, 2),
        }


def populations(bench, rounds, num_runs=8):
    """Yields the time of a step of eight runs, trained in turn by one program, and
    together as one stacked state; and what it takes to compile either."""
    step = population.make_step(bench.program.step, num_runs)
    states = jax.tree.map(lambda x: jnp.stack([x] * num_runs), bench.state)
    states = jax.device_put(states, step.sharding)
    batches = {name: np.stack([x] * num_runs) for name, x in bench.batch.items()}
    begin = time.perf_counter()
    update = step.update.lower(states, batches).compile()
    compile_seconds = time.perf_counter() - begin

    def together():
        nonlocal states
        states, metrics = update(states, batches)
        return metrics

    def in_turn():
        return [bench.step() for _ in range(num_runs)]

    calls = {"in turn": in_turn, "together": together}
    seconds = {name: min(times) for name, times in measure(calls, rounds).items()}
    compiling = {"in turn": bench.compile_seconds, "together": compile_seconds}
    for name, value in seconds.items():
        yield {
            "runs": f"{num_runs} {name}",
            "step_ms": round(value * 1e3, 1),
            "times_in_turn": round(seconds["in turn"] / value, 2),
            "compile_s": round(compiling[name], 1),
        }


PARTS = {
    "loss_head": loss_heads,
    "corruption": corruption,
    "packing": packing,
    "population": populations,
}
