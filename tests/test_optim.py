"""What an update does to the parameters: schedule, decay, clipping, AdamW."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlm_jax import optim, schedules
from tests.helpers import (
    compile_train_step,
    hparams,
    make_state,
    random_params,
    tiny_model,
)

# Every parameter of the model that decays, and every one that does not.
SHARED_DECAYED = {
    "encoder/embed/embedding",
    "encoder/position_embed/embedding",
    "encoder/blocks/attention/query/kernel",
    "encoder/blocks/attention/key/kernel",
    "encoder/blocks/attention/value/kernel",
    "encoder/blocks/attention/out/kernel",
    "encoder/blocks/mlp/up/kernel",
    "encoder/blocks/mlp/down/kernel",
    "transform/dense/kernel",
}
SHARED_KEPT = {
    "encoder/blocks/attention/query/bias",
    "encoder/blocks/attention/key/bias",
    "encoder/blocks/attention/value/bias",
    "encoder/blocks/attention/out/bias",
    "encoder/blocks/attention_norm/scale",
    "encoder/blocks/attention_norm/bias",
    "encoder/blocks/mlp/up/bias",
    "encoder/blocks/mlp/down/bias",
    "encoder/blocks/mlp_norm/scale",
    "encoder/blocks/mlp_norm/bias",
    "transform/dense/bias",
    "transform/norm/scale",
    "transform/norm/bias",
    "bias",
}
KEPT = {
    "post": SHARED_KEPT | {"encoder/embed_norm/scale", "encoder/embed_norm/bias"},
    "pre": SHARED_KEPT | {"encoder/final_norm/scale", "encoder/final_norm/bias"},
}


def by_name(params):
    """Returns {"encoder/embed/embedding": array, …}."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(params))
    return {"/".join(part.key for part in path): leaf for path, leaf in leaves}


# ---- decay --------------------------------------------------------------------------


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("optimizer", sorted(optim.OPTIMIZERS))
def test_b46_exactly_kernels_and_embeddings_decay(optimizer, norm_position):
    """Zero gradients, learning rate 1, weight decay 0.1: minus 10% or nothing. LAMB
    makes an update as large as what it updates."""
    params = random_params(tiny_model(norm_position=norm_position))

    @jax.jit
    def update(params):
        transform = optim.OPTIMIZERS[optimizer](1.0, hparams(weight_decay=0.1))
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = transform.update(zeros, transform.init(params), params)
        return optax.apply_updates(params, updates)

    before, after = by_name(params), by_name(update(params))

    assert before.keys() == SHARED_DECAYED | KEPT[norm_position]
    left = 0 if optimizer == "lamb" else 0.9
    for name in SHARED_DECAYED:
        want = left * before[name]
        np.testing.assert_allclose(after[name], want, rtol=1e-6, atol=1e-6)
    for name in KEPT[norm_position]:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


# ---- schedule -----------------------------------------------------------------------


def scales(schedule, warmup_steps, num_steps, last=None, decay_begin=0):
    """Returns the scale at 0, 1, … num_steps, computed with traced durations."""
    updates = jnp.arange((last or num_steps) + 1)

    @jax.jit
    def scale(warmup_steps, num_steps):
        return schedules.scale(
            updates,
            schedule=schedule,
            warmup_steps=warmup_steps,
            num_steps=num_steps,
            decay_begin=decay_begin,
        )

    return np.asarray(scale(np.float32(warmup_steps), np.float32(num_steps)))


def test_b49_linear_schedule_at_every_update():
    """Updates count from 1, so that 0 is before the first one."""
    values = scales("linear", 4, 10)
    want = [0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    np.testing.assert_allclose(values, want, atol=1e-6)
    assert (values == 1).sum() == 1
    assert values[1] > 0  # the first update is not wasted


def test_b49_cosine_and_constant_at_their_boundaries():
    values = scales("cosine", 4, 10)
    np.testing.assert_allclose(values[:5], [0, 0.25, 0.5, 0.75, 1], atol=1e-7)
    np.testing.assert_allclose(
        values[5:], [0.933013, 0.75, 0.5, 0.25, 0.066987, 0], atol=1e-6
    )
    assert (values == 1).sum() == 1
    np.testing.assert_allclose(
        scales("constant", 4, 10), [0, 0.25, 0.5, 0.75] + [1] * 7, atol=1e-7
    )


def test_a_decay_that_begins_late():
    """Warm-up, stable, decay. A decay begins no sooner than the warm-up ends."""
    want = [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    np.testing.assert_allclose(scales("linear", 2, 10, decay_begin=6), want, atol=1e-6)
    np.testing.assert_array_equal(
        scales("cosine", 4, 10, decay_begin=3), scales("cosine", 4, 10)
    )


@pytest.mark.parametrize("schedule", sorted(schedules.DECAYS))
@pytest.mark.parametrize("warmup_steps, num_steps", [(0, 10), (10, 10), (0, 1), (1, 1)])
def test_b49_degenerate_durations(schedule, warmup_steps, num_steps):
    values = scales(schedule, warmup_steps, num_steps)
    assert np.isfinite(values).all()
    assert ((values >= 0) & (values <= 1)).all()
    assert values[warmup_steps] == 1
    if warmup_steps == num_steps:
        want = np.arange(num_steps + 1) / num_steps
        np.testing.assert_allclose(values, want, atol=1e-7)


def test_one_minus_sqrt_and_inverse_sqrt():
    want = [0, 0.5, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]
    found = scales("one_minus_sqrt", 2, 8, decay_begin=4)
    np.testing.assert_allclose(found, want, atol=1e-6)
    found = scales("inverse_sqrt", 4, 16)
    np.testing.assert_allclose(found[:5], [0, 0.25, 0.5, 0.75, 1], atol=1e-7)
    np.testing.assert_allclose(found[[9, 16]], [2 / 3, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "schedule, end",
    [
        ("linear", 0),
        ("cosine", 0),
        ("constant", 1),
        ("one_minus_sqrt", 0),
        ("inverse_sqrt", 0.4**0.5),
    ],
)
def test_b49_after_the_last_update_the_end_value_stays(schedule, end):
    np.testing.assert_allclose(scales(schedule, 4, 10, last=13)[10:], end, atol=1e-7)


# ---- the step -----------------------------------------------------------------------


def keep(key, batch, hparams, progress):
    """A corruption that changes nothing: the batch is made by hand."""
    return batch, {}


def linear_loss(params, batch, key, **regularisers):
    """The gradient of each parameter is the sum over rows of its column in `slope`."""
    loss = sum(jnp.sum(batch["slope"][name] * params[name]) for name in params)
    return loss, {"loss": loss, "weight": batch["weights"].sum()}


def slope_batch(**slopes):
    """A row for each entry of the slopes, one prediction a row."""
    slopes = {name: np.asarray(x, np.float32) for name, x in slopes.items()}
    num_rows = len(next(iter(slopes.values())))
    return {
        "slope": slopes,
        "weights": np.ones((num_rows, 1), np.float32),
        "segment": np.ones((num_rows, 1), np.int32),
    }


def compile_linear_step(optimizer="sgd", num_microbatches=1, schedule="constant"):
    return compile_train_step(
        corrupt=keep,
        loss_fn=linear_loss,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


def test_b50_the_reported_learning_rate_is_the_applied_one():
    """A gradient of exactly 1: two rows of slope 1, two predictions."""
    batch = slope_batch(kernel=[1, 1])
    train_step = compile_linear_step(schedule="linear")
    numbers = hparams(peak_learning_rate=1.0, warmup_steps=4.0, num_steps=10.0)
    state = make_state({"kernel": jnp.float32(0)}, "sgd", numbers)
    changes, reported, saved = [], [], None
    for update in range(1, 11):
        before = float(state.params["kernel"])
        state, metrics = train_step(state, batch)
        changes.append(before - float(state.params["kernel"]))
        reported.append(float(metrics["learning_rate"]))
        if update == 3:
            data = jax.device_get(state.replace(key=jax.random.key_data(state.key)))
            saved = pickle.dumps(data)
    want = [0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    np.testing.assert_allclose(changes, want, atol=1e-6)
    np.testing.assert_allclose(reported, changes, atol=1e-6)

    # Restarted from what was saved after update 3, with a step compiled anew.
    state = jax.tree.map(jnp.asarray, pickle.loads(saved))
    state = state.replace(key=jax.random.wrap_key_data(state.key))
    assert state.step == 3
    before = float(state.params["kernel"])
    state, metrics = compile_linear_step(schedule="linear")(state, batch)
    assert float(metrics["learning_rate"]) == reported[3]
    assert before - float(state.params["kernel"]) == changes[3]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("clip_norm, want", [(1.0, (0.6, 0.8)), (10.0, (3.0, 4.0))])
def test_b54_the_whole_gradient_is_clipped_once(num_microbatches, clip_norm, want):
    """Rows of slope (6, 0) and (0, 8), two predictions: a mean gradient of (3, 4), of
    norm 5. Clipping each micro-batch, tensor or sum gives something else."""
    batch = slope_batch(kernel=[6, 0], bias=[0, 8])
    params = {"kernel": jnp.float32(0), "bias": jnp.float32(0)}
    numbers = hparams(peak_learning_rate=1.0, clip_norm=clip_norm)
    state = make_state(params, "sgd", numbers)
    state, metrics = compile_linear_step("sgd", num_microbatches)(state, batch)
    change = -float(state.params["kernel"]), -float(state.params["bias"])
    np.testing.assert_allclose(change, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], 5, rtol=1e-6)  # before clipping


def test_decay_is_not_clipped_and_is_scaled_by_the_learning_rate():
    """Decoupled: 0.5 x (0.6 + 0.2 x 2) for the kernel, 0.5 x 0.8 for the bias."""
    batch = slope_batch(kernel=[3], bias=[4])
    params = {"kernel": jnp.float32(2), "bias": jnp.float32(2)}
    numbers = hparams(peak_learning_rate=0.5, clip_norm=1.0, weight_decay=0.2)
    state = make_state(params, "sgd", numbers)
    state, _ = compile_linear_step()(state, batch)
    np.testing.assert_allclose(state.params["kernel"], 2 - 0.5, rtol=1e-6)
    np.testing.assert_allclose(state.params["bias"], 2 - 0.4, rtol=1e-6)


# ---- AdamW --------------------------------------------------------------------------


def adamw_reference(params, grads_of_step, rates, h):
    """Loshchilov & Hutter 2019, algorithm 2, in double precision, after clipping."""
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    m = {name: np.zeros_like(x) for name, x in params.items()}
    v = {name: np.zeros_like(x) for name, x in params.items()}
    for t, (grads, rate) in enumerate(zip(grads_of_step, rates, strict=True), 1):
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
        for name, g in grads.items():
            g = g * min(1, h["clip_norm"] / norm)
            m[name] = h["b1"] * m[name] + (1 - h["b1"]) * g
            v[name] = h["b2"] * v[name] + (1 - h["b2"]) * g**2
            m_hat, v_hat = m[name] / (1 - h["b1"] ** t), v[name] / (1 - h["b2"] ** t)
            decay = h["weight_decay"] * params[name] if name == "kernel" else 0
            params[name] = params[name] - rate * (
                m_hat / (np.sqrt(v_hat) + h["eps"]) + decay
            )
    return params


def test_adamw_equals_the_reference_over_ten_steps_and_compiles_once():
    """Steps are clipped or not, and eps matters; each has its own learning rate."""
    rng = np.random.default_rng(0)
    params = {
        "kernel": rng.normal(size=(3, 4)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    grads_of_step = [
        {
            name: rng.normal(0, size, x.shape).astype(np.float32)
            for name, x in params.items()
        }
        for size in (1, 0.01, 3, 0.1, 1e-4, 1, 1, 0.2, 5, 1)
    ]
    rates = np.linspace(0.3, 0.01, 10)
    num_traces = 0

    @jax.jit
    def update(params, opt_state, grads, rate, numbers):
        nonlocal num_traces
        num_traces += 1
        factor = optim.clip_factor(optax.tree.norm(grads), numbers["clip_norm"])
        grads = jax.tree.map(lambda g: g * factor, grads)
        transform = optim.adamw(rate, numbers)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run(**changes):
        h = dict(weight_decay=0.1, clip_norm=1.0, b1=0.9, b2=0.99, eps=1e-3) | changes
        numbers = hparams(**h)
        now, opt_state = params, optim.adamw(rates[0], numbers).init(params)
        for grads, rate in zip(grads_of_step, rates, strict=True):
            now, opt_state = update(now, opt_state, grads, jnp.float32(rate), numbers)
        want = adamw_reference(params, grads_of_step, rates, h)
        for name in params:
            np.testing.assert_allclose(now[name], want[name], rtol=1e-5, atol=1e-5)

    run()
    run(weight_decay=0.3, clip_norm=0.5, b1=0.8, b2=0.95, eps=1e-2)
    assert num_traces == 1


def test_no_number_recompiles_the_step():
    num_traces = 0

    def counted_loss(params, batch, key, **regularisers):
        nonlocal num_traces
        num_traces += 1
        return linear_loss(params, batch, key)

    train_step = compile_train_step(
        corrupt=keep, loss_fn=counted_loss, optimizer="adamw", schedule="cosine"
    )
    batch = slope_batch(kernel=[3], bias=[4])
    params = {"kernel": jnp.float32(2), "bias": jnp.float32(2)}
    results = set()
    for changes in (
        {},
        {"peak_learning_rate": 0.5},
        {"weight_decay": 0.5},
        {"warmup_steps": 7.0},
        {"num_steps": 3.0},
    ):
        state, _ = train_step(make_state(params, "adamw", hparams(**changes)), batch)
        results.add(float(state.params["kernel"]))
    assert num_traces == 1
    assert len(results) == 5  # and yet every number was heard
