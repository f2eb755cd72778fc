"""The fused masked cross-entropy: as the plain one, and sound where that fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from mlm_jax import loss, loss_xla, step
from tests.helpers import (
    CLS,
    compile_train_step,
    hparams,
    largest_shape,
    make_batch,
    make_corrupt,
    make_state,
    random_params,
    tiny_model,
)


def value_and_grads(
    hidden_NxD,
    table_VxD,
    bias_V,
    targets_N,
    weights_N,
    smoothing=0.0,
    z_loss=0.0,
    *,
    num_classes,
    chunk,
):
    """Returns (objective, predictions), (d hidden, d table, d bias)."""
    return jax.value_and_grad(
        loss.masked_cross_entropy, argnums=(0, 1, 2), has_aux=True
    )(
        hidden_NxD,
        table_VxD,
        bias_V,
        targets_N,
        weights_N,
        num_classes=num_classes,
        label_smoothing=smoothing,
        z_loss=z_loss,
        chunk=chunk,
    )


# The regularisers are traced: no test compiles for another value of them.
fused = jax.jit(value_and_grads, static_argnames=("num_classes", "chunk"))


def reference(
    hidden_NxD, table_VxD, bias_V, targets_N, weights_N, smoothing=0.0, z_loss=0.0
):
    """The same in double precision, nothing fused."""
    hidden_NxD, table_VxD, bias_V, weights_N = (
        np.asarray(x, np.float64) for x in (hidden_NxD, table_VxD, bias_V, weights_N)
    )
    logits_NxV = hidden_NxD @ table_VxD.T + bias_V
    max_Nx1 = logits_NxV.max(1, keepdims=True)
    log_z_Nx1 = max_Nx1 + np.log(np.exp(logits_NxV - max_Nx1).sum(1, keepdims=True))
    log_p_NxV = logits_NxV - log_z_Nx1
    each_N, num_classes = np.arange(len(targets_N)), len(bias_V)
    losses_N = -log_p_NxV[each_N, targets_N]
    objective_N = (1 - smoothing) * losses_N - smoothing * log_p_NxV.mean(1)
    objective_N += z_loss * log_z_Nx1[:, 0] ** 2
    d_logits_NxV = np.exp(log_p_NxV) * (1 + 2 * z_loss * log_z_Nx1)
    d_logits_NxV -= smoothing / num_classes
    d_logits_NxV[each_N, targets_N] -= 1 - smoothing
    d_logits_NxV *= weights_N[:, None]
    # A stable sort leaves equal logits in the order of their classes.
    order_NxV = np.argsort(-logits_NxV, axis=1, kind="stable")
    ranks_N = np.argmax(order_NxV == np.asarray(targets_N)[:, None], axis=1)
    is_used_N = weights_N > 0
    predictions = loss.Predictions(
        np.where(is_used_N, losses_N, 0),
        np.where(is_used_N, ranks_N, num_classes),
        np.where(is_used_N, -log_p_NxV.max(1), 0),
    )
    return (weights_N @ objective_N, predictions), (
        d_logits_NxV @ table_VxD,
        d_logits_NxV.T @ hidden_NxD,
        d_logits_NxV.sum(0),
    )


def relative_errors(grads, want_grads):
    """Returns the largest error of each, relative to its largest element."""
    return [
        np.abs(np.asarray(grad, np.float64) - want).max() / np.abs(want).max()
        for grad, want in zip(grads, want_grads, strict=True)
    ]


def of_logits(
    logits_NxV,
    targets_N,
    weights_N=None,
    *regularisers,
    num_classes=None,
    chunk=2,
):
    """With the identity for a table the hidden vectors are the logits."""
    logits_NxV = np.asarray(logits_NxV, np.float32)
    num_slots, num_columns = logits_NxV.shape
    if weights_N is None:
        weights_N = np.ones(num_slots)
    return jax.device_get(
        fused(
            logits_NxV,
            np.eye(num_columns, dtype=np.float32),
            np.zeros(num_columns, np.float32),
            np.asarray(targets_N, np.int32),
            np.asarray(weights_N, np.float32),
            *regularisers,
            num_classes=num_classes or num_columns,
            chunk=chunk,
        )
    )


def random_inputs(num_slots, num_classes, weights, seed=0, width=6):
    """Returns hidden, table, bias, targets, weights with logits of order 1."""
    rng = np.random.default_rng(seed)
    weights_N = {
        "zero and one": rng.integers(0, 2, num_slots),
        "fractional": rng.uniform(0, 2, num_slots) * rng.integers(0, 2, num_slots),
    }[weights]
    return (
        rng.normal(0, 0.7, (num_slots, width)).astype(np.float32),
        rng.normal(0, 0.7, (num_classes, width)).astype(np.float32),
        rng.normal(0, 0.7, num_classes).astype(np.float32),
        rng.integers(0, num_classes, num_slots).astype(np.int32),
        weights_N.astype(np.float32),
    )


def assert_all_zero(tree):
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), tree)


def assert_all_finite(tree):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(tree)))


# ---- the worked numbers -------------------------------------------------------------


@pytest.mark.parametrize(
    "logits_V, p, want",
    [
        ((2, 1, 0), 0.665241, 0.407606),
        ((0, 0, 0), 1 / 3, np.log(3)),
        ((1, 0, 0), 0.576117, 0.551445),
        ((10, 1, 0), 0.999831, 0.000169),
    ],
)
def test_worked_numbers(logits_V, p, want):
    """The first class is the true one."""
    (value, _), (d_logits_NxV, _, d_bias_V) = of_logits([logits_V], [0])
    assert abs(value - want) < 1e-6
    assert abs(np.exp(-value) - p) < 1e-6
    assert value > 0  # a probability is never exactly 1
    # The gradient is the probability, less one for the true class.
    assert abs(d_logits_NxV[0, 0] - (p - 1)) < 1e-6
    assert abs(d_logits_NxV.sum()) < 1e-6
    np.testing.assert_allclose(d_bias_V, d_logits_NxV[0], atol=1e-7)


def test_a_tie_gives_each_class_a_third():
    losses = [of_logits([(5, 5, 5)], [target])[0][0] for target in range(3)]
    np.testing.assert_allclose(losses, np.log(3), rtol=1e-6)


def test_sum_and_mean_over_the_masked_slots():
    """A slot that is not masked is in neither the sum nor the count."""
    logits_NxV = [(2, 1, 0), (4, 4, -9), (0, 0, 0)]
    weights_N = np.array([1, 0, 1])
    (total, _), (d_logits_NxV, _, _) = of_logits(logits_NxV, [0, 0, 1], weights_N)
    assert abs(total - (0.407606 + 1.098612)) < 2e-6
    assert abs(total / weights_N.sum() - 0.753109) < 1e-6
    assert_all_zero(d_logits_NxV[1])
    np.testing.assert_allclose(
        d_logits_NxV[[0, 2]],
        [(-0.334759, 0.244728, 0.090031), (1 / 3, -2 / 3, 1 / 3)],
        atol=1e-6,
    )


# ---- against double precision -------------------------------------------------------


REGULARISERS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.05), (0.1, 0.05)]


@pytest.mark.parametrize("regularisers", REGULARISERS)
@pytest.mark.parametrize("weights", ["zero and one", "fractional"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 256])
def test_value_and_gradients_equal_the_unfused(chunk, weights, regularisers):
    """13 slots: a chunk each, a last chunk not full, a chunk too large. The vectors
    have 6 numbers: chunks of fewer slots add to the table's gradient by blocks."""
    inputs = random_inputs(13, 11, weights)
    (value, predictions), grads = fused(
        *inputs, *regularisers, num_classes=11, chunk=chunk
    )
    (want, want_predictions), want_grads = reference(*inputs, *regularisers)
    assert abs(value - want) <= 1e-6 * want
    np.testing.assert_allclose(
        predictions.losses_N, want_predictions.losses_N, rtol=2e-6, atol=1e-7
    )
    np.testing.assert_allclose(
        predictions.top_losses_N, want_predictions.top_losses_N, rtol=2e-6, atol=1e-7
    )
    np.testing.assert_array_equal(predictions.ranks_N, want_predictions.ranks_N)
    assert max(relative_errors(grads, want_grads)) <= 1e-6


@pytest.mark.parametrize("regularisers", REGULARISERS)
@pytest.mark.parametrize("chunk", [4, 256])
def test_padding_of_the_vocabulary_has_probability_zero(chunk, regularisers):
    """11 classes in a table of 16 rows give what a table of 11 rows gives, even where
    the other 5 would have the largest logits."""
    hidden_NxD, table_VxD, bias_V, *slots = random_inputs(13, 11, "zero and one")
    padded_table_VxD = np.concatenate([table_VxD, np.full((5, 6), 3, np.float32)])
    padded_bias_V = np.concatenate([bias_V, np.full(5, 50, np.float32)])
    (value, predictions), (d_hidden_NxD, d_table_VxD, d_bias_V) = fused(
        hidden_NxD,
        padded_table_VxD,
        padded_bias_V,
        *slots,
        *regularisers,
        num_classes=11,
        chunk=chunk,
    )
    assert_all_zero((d_table_VxD[11:], d_bias_V[11:]))
    (want, want_predictions), want_grads = reference(
        hidden_NxD, table_VxD, bias_V, *slots, *regularisers
    )
    assert abs(value - want) <= 1e-6 * want
    np.testing.assert_array_equal(predictions.ranks_N, want_predictions.ranks_N)
    grads = (d_hidden_NxD, d_table_VxD[:11], d_bias_V[:11])
    assert max(relative_errors(grads, want_grads)) <= 1e-6


def test_losses_are_bare_whatever_the_regularisers():
    inputs = random_inputs(13, 11, "fractional")
    (objective, bare), _ = fused(*inputs, num_classes=11, chunk=4)
    (regularised, same), _ = fused(*inputs, 0.1, 0.05, num_classes=11, chunk=4)
    assert regularised > objective + 0.1
    jax.tree.map(np.testing.assert_array_equal, bare, same)
    np.testing.assert_allclose(inputs[4] @ bare.losses_N, objective, rtol=1e-6)


def test_the_value_alone_is_the_value_with_gradients():
    """They are two programs: evaluation makes no gradients."""
    inputs = random_inputs(13, 11, "fractional")
    alone = jax.jit(
        lambda *inputs: loss.masked_cross_entropy(
            *inputs, num_classes=11, label_smoothing=0.1, z_loss=0.05, chunk=4
        )
    )(*inputs)
    together, _ = fused(*inputs, 0.1, 0.05, num_classes=11, chunk=4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), alone, together
    )


def test_b41_smoothing_leaves_ignored_positions_out():
    logits_NxV, weights_N = [(2, 0, 0, 0), (2, 0, 0, 0)], [1, 0]
    (value, predictions), (d_logits_NxV, *_) = of_logits(
        logits_NxV, [0, 0], weights_N, 0.1
    )
    assert abs(value - 0.490753) < 1e-6
    np.testing.assert_allclose(predictions.losses_N, [0.340753, 0], atol=1e-6)
    p_V = np.exp((2, 0, 0, 0)) / np.exp((2, 0, 0, 0)).sum()
    want_V = p_V - np.array([0.925, 0.025, 0.025, 0.025])
    np.testing.assert_allclose(d_logits_NxV, [want_V, np.zeros(4)], atol=1e-6)


def test_z_loss_pulls_log_z_to_zero():
    """Of two equal logits a, log z is a + ln 2: at 1 and 1, 1.693147."""
    log_z = 1.693147
    (value, _), (d_logits_NxV, *_) = of_logits([(1, 1)], [0], [1], 0.0, 0.1)
    assert abs(value - (np.log(2) + 0.1 * log_z**2)) < 1e-6
    pull = 2 * 0.1 * log_z * 0.5
    np.testing.assert_allclose(d_logits_NxV, [(pull - 0.5, pull + 0.5)], atol=1e-6)


# ---- ranks --------------------------------------------------------------------------


def test_ranks_count_the_classes_that_come_first():
    """Of tied logits the first class comes first; an unused slot never counts."""
    logits_NxV = [(1, 3, 3), (1, 3, 3), (3, 1, 0), (3, 1, 0), (0, 0, 9), (7, 7, 7)]
    weights_N = [1, 1, 0.5, 1, 0, 2]
    targets_N = [1, 2, 0, 1, 2, 2]
    (_, predictions), _ = of_logits(logits_NxV, targets_N, weights_N)
    np.testing.assert_array_equal(predictions.ranks_N, [0, 1, 0, 1, 3, 2])
    assert predictions.ranks_N.dtype == np.int32


@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_ranks_below_k_are_the_hits_of_top_k(k):
    hidden_NxD, table_VxD, bias_V, targets_N, _ = random_inputs(64, 11, "fractional")
    logits_NxV = hidden_NxD @ table_VxD.T + bias_V[None]
    _, best_Nxk = jax.lax.top_k(logits_NxV, k)
    is_hit_N = (best_Nxk == targets_N[:, None]).any(1)
    (_, predictions), _ = of_logits(logits_NxV, targets_N)
    np.testing.assert_array_equal(predictions.ranks_N < k, is_hit_N)


# ---- accuracy -----------------------------------------------------------------------


def scaled_inputs(num_slots, scale, dtype=np.float32, width=64, num_classes=3000):
    """Returns inputs whose logits have about the standard deviation `scale`."""
    rng = np.random.default_rng(0)
    table_VxD = rng.normal(0, scale / width**0.5, (num_classes, width))
    return (
        jnp.asarray(rng.normal(size=(num_slots, width)), dtype),
        jnp.asarray(table_VxD, np.float32),
        jnp.asarray(rng.normal(0, 0.1, num_classes), np.float32),
        jnp.asarray(rng.integers(0, num_classes, num_slots), np.int32),
        jnp.ones(num_slots),
    )


def optax_value_and_grads(*inputs):
    def value(hidden_NxD, table_VxD, bias_V, targets_N, weights_N):
        logits_NxV = hidden_NxD @ table_VxD.T + bias_V[None]
        return weights_N @ optax.softmax_cross_entropy_with_integer_labels(
            logits_NxV, targets_N
        )

    return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(*inputs)


def errors(value, grads, inputs):
    (want, _), want_grads = reference(*inputs)
    return abs(value - want) / want, max(relative_errors(grads, want_grads))


@pytest.mark.parametrize("scale, tolerance", [(1, 1e-6), (20, 5e-6)])
@pytest.mark.parametrize("num_slots", [1, 96])
def test_float32_is_as_good_as_double_precision(num_slots, scale, tolerance):
    inputs = scaled_inputs(num_slots, scale)
    (value, _), grads = fused(*inputs, num_classes=3000, chunk=32)
    value_error, grad_error = errors(value, grads, inputs)
    assert value_error <= 1e-6
    assert grad_error <= tolerance


@pytest.mark.parametrize("num_slots", [1, 96])
def test_bfloat16_vectors(num_slots):
    inputs = scaled_inputs(num_slots, 1, jnp.bfloat16)
    (value, _), grads = fused(*inputs, num_classes=3000, chunk=32)
    table_VxD = inputs[1].astype(jnp.bfloat16).astype(jnp.float32)
    value_error, grad_error = errors(
        value, grads, (inputs[0].astype(jnp.float32), table_VxD, *inputs[2:])
    )
    assert value_error <= 1e-6  # of the same rounded inputs
    assert grad_error <= 1e-2


@pytest.mark.parametrize("num_slots", [1, 96])
@pytest.mark.parametrize("scale", [1, 20, 1e4])
def test_never_worse_than_optax(num_slots, scale):
    inputs = scaled_inputs(num_slots, scale)
    (value, _), grads = fused(*inputs, num_classes=3000, chunk=32)
    assert_all_finite((value, grads))
    value_error, grad_error = errors(value, grads, inputs)
    optax_value_error, optax_grad_error = errors(
        *optax_value_and_grads(*inputs), inputs
    )
    # A value is one rounding of many: half a unit of the last place is chance.
    assert value_error <= max(optax_value_error, 1.2e-7)
    assert grad_error <= optax_grad_error * 1.01


def test_a_small_loss_keeps_its_digits():
    """Of 2.25e-7, log p and p - 1 in float32 would have one."""
    logits_V = np.array([16, 0, 0])
    (value, _), (d_logits_NxV, *_) = of_logits([logits_V], [0])
    others = 2 * np.exp(-16)
    p = 1 / (1 + others)
    np.testing.assert_allclose(value, np.log1p(others), rtol=1e-6)
    np.testing.assert_allclose(
        d_logits_NxV, [(-others * p, others * p / 2, others * p / 2)], rtol=1e-6
    )


def test_the_cotangent_enters_once():
    """Adam does not tell a loss from three times the loss; its users do."""
    hidden_NxD, *others = random_inputs(13, 11, "fractional")

    def scaled(hidden_NxD, table_VxD, bias_V, factor):
        value, _ = loss.masked_cross_entropy(
            hidden_NxD, table_VxD, bias_V, *others[2:], num_classes=11, chunk=4
        )
        return factor * value

    grad_fn = jax.jit(jax.grad(scaled, argnums=(0, 1, 2, 3)))
    single = grad_fn(hidden_NxD, *others[:2], 1.0)
    triple = grad_fn(hidden_NxD, *others[:2], 3.0)
    for one, three in zip(single[:3], triple[:3], strict=True):
        np.testing.assert_allclose(three, 3 * one, rtol=1e-6, atol=1e-7)
    (want, _), _ = reference(hidden_NxD, *others)
    np.testing.assert_allclose(single[3], want, rtol=1e-6)


def test_bfloat16_vectors_have_float32_sums():
    """1,024 slots of loss about ln 3: a bfloat16 sum would stop growing at 512."""
    num_slots = 1024
    rng = np.random.default_rng(0)
    inputs = (
        jnp.asarray(rng.normal(0, 0.7, (num_slots, 6)), jnp.bfloat16),
        jnp.asarray(rng.normal(0, 0.7, (11, 6)), jnp.float32),
        jnp.asarray(rng.normal(0, 0.7, 11), jnp.float32),
        jnp.asarray(rng.integers(0, 11, num_slots)),
        jnp.ones(num_slots),
    )
    (value, predictions), grads = fused(*inputs, num_classes=11, chunk=16)
    (want, _), want_grads = reference(*inputs)
    assert value.dtype == predictions.losses_N.dtype == jnp.float32
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    assert abs(value - want) <= 1e-2 * want
    assert max(relative_errors(grads, want_grads)) <= 1e-2


@pytest.mark.parametrize("target, want", [(0, 0), (1, 2e4), (2, 1e4)])
def test_logits_of_ten_thousand_are_finite(target, want):
    (value, _), grads = of_logits([(1e4, -1e4, 0)], [target])
    assert abs(value - want) <= 1e-6 * want
    assert_all_finite(grads)


# ---- where there is nothing to predict ----------------------------------------------


def test_b34_no_target_gives_zero_and_zero_gradients():
    hidden_NxD, table_VxD, bias_V, targets_N, _ = random_inputs(13, 11, "fractional")
    weights_N = np.zeros(13, np.float32)
    (value, predictions), grads = fused(
        hidden_NxD,
        table_VxD,
        bias_V,
        targets_N,
        weights_N,
        0.1,
        0.05,
        num_classes=11,
        chunk=4,
    )
    assert_all_zero((value, predictions.losses_N, grads))
    assert (predictions.ranks_N == 11).all()


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@functools.cache
def compile_model_step(model, num_microbatches):
    return compile_train_step(
        corrupt=make_corrupt(),
        loss_fn=step.make_loss_fn(model, 12, train=True),
        optimizer="sgd",
        num_microbatches=num_microbatches,
    )


def rows_with_targets(seed):
    return np.random.default_rng(seed).integers(5, 12, (4, 16))


def test_b34_a_batch_without_a_target_between_two_others(model):
    train_step = compile_model_step(model, 1)
    state = make_state(random_params(model), "sgd", hparams())
    metrics, states = [], []
    for tokens_BxL in (
        rows_with_targets(0),
        np.full((4, 16), CLS),
        rows_with_targets(1),
    ):
        state, step_metrics = train_step(state, make_batch(tokens_BxL))
        metrics.append(jax.device_get(step_metrics))
        states.append(jax.device_get(state.params))
        assert_all_finite((state.params, state.opt_state, step_metrics))
    assert [m["num_masked"] > 0 for m in metrics] == [True, False, True]
    for name in ("loss", "num_correct", "num_top5", "grad_norm", "mask_hash"):
        assert metrics[1][name] == 0
    # Plain descent stands still where there is nothing to learn, and then goes on.
    jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
    assert not np.array_equal(states[1]["bias"], states[2]["bias"])
    assert metrics[0]["loss"] > 0 and metrics[2]["loss"] > 0


def test_b34_a_microbatch_without_a_target_adds_nothing(model):
    """Sums, not means of means: the other three weigh as they do in one batch."""
    tokens_BxL = rows_with_targets(0)
    tokens_BxL[1] = CLS
    state = make_state(random_params(model), "sgd", hparams())
    batch = make_batch(tokens_BxL)
    whole, whole_metrics = compile_model_step(model, 1)(state, batch)
    parts, parts_metrics = compile_model_step(model, 4)(state, batch)
    assert parts_metrics["num_masked"] == whole_metrics["num_masked"] > 0
    np.testing.assert_allclose(parts_metrics["loss"], whole_metrics["loss"], rtol=1e-6)
    for one, other, old in zip(
        *map(jax.tree.leaves, (whole.params, parts.params, state.params)), strict=True
    ):
        np.testing.assert_allclose(other - old, one - old, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("huge", [100, 1e4])
def test_b39_an_excluded_class_with_a_huge_logit(huge):
    (value, _), (d_logits_NxV, d_table_VxD, d_bias_V) = of_logits(
        [(1, 1, huge)], [0], num_classes=2
    )
    assert abs(value - np.log(2)) < 1e-6
    np.testing.assert_allclose(d_logits_NxV, [(-0.5, 0.5, 0)], atol=1e-7)
    assert d_logits_NxV[0, 2] == 0
    assert_all_zero((d_table_VxD[2], d_bias_V[2]))
    assert_all_finite(d_table_VxD)


def test_b39_a_slot_not_in_use_with_a_huge_logit():
    for logits_V in ((1e4, 0, -1e4), (-1e4, 0, 0), (3e38, -3e38, 0)):
        result = of_logits([(2, 1, 0), logits_V], [0, 1], [1, 0])
        want = of_logits([(2, 1, 0)], [0])
        assert result[0][0] == want[0][0]
        (d_logits_NxV, *shared), (want_NxV, *want_shared) = result[1], want[1]
        assert_all_zero(d_logits_NxV[1])
        np.testing.assert_array_equal(d_logits_NxV[0], want_NxV[0])
        jax.tree.map(np.testing.assert_array_equal, shared, want_shared)


@pytest.mark.parametrize("label", [-100, -1, 4, 54])
def test_b42_weight_zero_wins_over_any_label(label):
    """V is 4, so the labels are -100, -1, V and V + 50."""
    (value, predictions), grads = of_logits([(1, 2, 3, 4)], [label], [0])
    assert_all_zero((value, predictions.losses_N, grads))
    assert predictions.ranks_N == 4
    # Nor does it touch its neighbour in the chunk.
    result = of_logits([(1, 2, 3, 4), (2, 1, 0, 0)], [label, 0], [0, 1])
    want = of_logits([(0, 0, 0, 0), (2, 1, 0, 0)], [0, 0], [0, 1])
    jax.tree.map(np.testing.assert_array_equal, result[0], want[0])
    np.testing.assert_array_equal(result[1][0], want[1][0])


@pytest.mark.parametrize(
    "label, num_classes",
    # A row of the table that is padding is no class.
    [(-100, 4), (-1, 4), (4, 4), (54, 4), (3, 3)],
)
def test_b42_a_wrong_label_that_counts_is_never_another_class(label, num_classes):
    def value(targets_N, weight):
        return loss.masked_cross_entropy(
            jnp.ones((2, 4)),
            jnp.eye(4),
            jnp.zeros(4),
            targets_N,
            jnp.array([1.0, weight]),
            num_classes=num_classes,
        )

    objective, predictions = jax.jit(value)(jnp.array([0, label]), 1.0)
    assert np.isnan(objective) and np.isnan(predictions.losses_N[1])
    assert np.isfinite(predictions.losses_N[0])
    assert_all_finite(value(jnp.array([0, label]), 0.0))
    assert_all_finite(value(jnp.array([0, num_classes - 1]), 1.0))


# ---- its size and its use -----------------------------------------------------------


def largest(fn, *args):
    """Returns the largest shape in the compiled gradient of `fn`."""
    grad_fn = jax.jit(jax.value_and_grad(fn, has_aux=True))
    return largest_shape(grad_fn.lower(*args).compile())


def test_logits_are_never_whole(monkeypatch):
    """64 rows of 16 tokens, all predicted, 128 columns: 1,024 x 128 whole logits. The
    largest array of a compiled step is a chunk's 256 x 128."""
    monkeypatch.setattr(loss_xla, "chunk_size", lambda *shape: 256)
    model = tiny_model(num_layers=1, num_heads=1)
    params = random_params(model)
    batch = make_batch(np.full((64, 16), 7))
    slots = np.broadcast_to(np.arange(16), (64, 16))
    batch |= dict(
        inputs=batch["tokens"],
        predict=slots,
        targets=batch["tokens"],
        weights=np.ones((64, 16), np.float32),
    )
    loss_fn = step.make_loss_fn(model, 12, train=True)
    assert largest(loss_fn, params, batch, jax.random.key(0)) == (256, 128)

    def whole(params, batch, key):
        hidden_BxMxD, table_VxD, bias_V = model.apply(
            {"params": params}, slots, slots, slots, slots
        )
        logits_BxMxV = hidden_BxMxD @ table_VxD.T + bias_V[None, None]
        return jax.nn.logsumexp(logits_BxMxV), ()

    # The yardstick itself: it does see whole logits where there are some.
    assert np.prod(largest(whole, params, batch, jax.random.key(0))) == 1024 * 128


NUM_COLUMNS, WIDTH = 30522, 768


def head_shapes(num_slots):
    return (
        jax.ShapeDtypeStruct((num_slots, WIDTH), np.float32),
        jax.ShapeDtypeStruct((NUM_COLUMNS, WIDTH), np.float32),
        jax.ShapeDtypeStruct((NUM_COLUMNS,), np.float32),
        jax.ShapeDtypeStruct((num_slots,), np.int32),
        jax.ShapeDtypeStruct((num_slots,), np.float32),
    )


def temporary_bytes(fn, num_slots):
    compiled = jax.jit(fn).lower(*head_shapes(num_slots)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_a_tenth_of_whole_logits_and_flat():
    ours = functools.partial(value_and_grads, num_classes=NUM_COLUMNS)
    whole = temporary_bytes(optax_value_and_grads, 4096)
    assert temporary_bytes(functools.partial(ours, chunk=None), 4096) <= whole / 10
    few, many = (
        temporary_bytes(functools.partial(ours, chunk=256), num_slots)
        for num_slots in (2048, 8192)
    )
    assert abs(many / few - 1) < 0.01


def test_the_chunk_follows_the_table():
    """Logits of a chunk are about as large as the documented budget, at any size."""
    for num_columns in (128, 8192, 30522, 131072, 1_000_000):
        chunk = loss_xla.chunk_size(num_columns, WIDTH)
        assert chunk * num_columns <= max(loss_xla.BUDGET, 64 * num_columns)
        assert chunk >= 64


def test_per_device_under_shard_map():
    """With its checks on: the program of each device is the loss of its own slots."""
    inputs = random_inputs(16, 11, "fractional")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def own(hidden_NxD, table_VxD, bias_V, *slots):
        table_VxD, bias_V = jax.lax.pcast((table_VxD, bias_V), "data", to="varying")
        (value, predictions), grads = value_and_grads(
            hidden_NxD, table_VxD, bias_V, *slots, 0.1, 0.05, num_classes=11, chunk=3
        )
        alone, _ = loss.masked_cross_entropy(
            hidden_NxD, table_VxD, bias_V, *slots, num_classes=11
        )
        sums = value, alone, grads[1:]
        return jax.lax.psum(sums, "data"), predictions, grads[0]

    rows, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(rows, whole, whole, rows, rows),
        out_specs=(whole, rows, rows),
    )
    (value, alone, d_output), predictions, d_hidden_NxD = jax.jit(mapped)(*inputs)
    (want, want_predictions), want_grads = reference(*inputs, 0.1, 0.05)
    assert abs(value - want) <= 1e-6 * want
    assert abs(alone - reference(*inputs)[0][0]) <= 1e-6 * alone
    np.testing.assert_array_equal(predictions.ranks_N, want_predictions.ranks_N)
    assert max(relative_errors((d_hidden_NxD, *d_output), want_grads)) <= 1e-6


def test_a_population_equals_its_members():
    members = [random_inputs(13, 11, "fractional", seed=seed) for seed in range(3)]
    stacked = [np.stack(x) for x in zip(*members, strict=True)]
    targets_N, weights_N = members[0][3:]

    def apart(hidden_NxD, table_VxD, bias_V):
        return value_and_grads(
            hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes=11, chunk=4
        )

    together = jax.jit(jax.vmap(apart))(*stacked[:3])
    alone = jax.jit(apart)
    for member, (hidden_NxD, table_VxD, bias_V, *_) in enumerate(members):
        want = alone(hidden_NxD, table_VxD, bias_V)
        jax.tree.map(
            lambda all_, one, member=member: np.testing.assert_allclose(
                all_[member], one, rtol=1e-6, atol=1e-6
            ),
            together,
            want,
        )
