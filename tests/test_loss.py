"""The fused masked cross-entropy: as the plain one, and sound where that fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from mlm_jax import loss, step
from tests.helpers import (
    CLS,
    compile_train_step,
    hparams,
    make_batch,
    make_corrupt,
    make_state,
    random_params,
    tiny_model,
)


def value_and_grads(
    hidden_NxD, table_VxD, bias_V, targets_N, weights_N, *, num_classes, chunk
):
    """Returns (loss, correct), (d hidden, d table, d bias)."""
    (value, (correct, _)), grads = jax.value_and_grad(
        loss.masked_cross_entropy, argnums=(0, 1, 2), has_aux=True
    )(
        hidden_NxD,
        table_VxD,
        bias_V,
        targets_N,
        weights_N,
        num_classes=num_classes,
        chunk=chunk,
    )
    return (value, correct), grads


fused = jax.jit(value_and_grads, static_argnames=("num_classes", "chunk"))


def reference(hidden_NxD, table_VxD, bias_V, targets_N, weights_N):
    """The same in double precision, nothing fused."""
    hidden_NxD, table_VxD, bias_V, weights_N = (
        np.asarray(x, np.float64) for x in (hidden_NxD, table_VxD, bias_V, weights_N)
    )
    logits_NxV = hidden_NxD @ table_VxD.T + bias_V
    shifted_NxV = logits_NxV - logits_NxV.max(1, keepdims=True)
    p_NxV = np.exp(shifted_NxV) / np.exp(shifted_NxV).sum(1, keepdims=True)
    each_N = np.arange(len(targets_N))
    loss_N = -np.log(p_NxV[each_N, targets_N])
    d_logits_NxV = p_NxV.copy()
    d_logits_NxV[each_N, targets_N] -= 1
    d_logits_NxV *= weights_N[:, None]
    correct_N = logits_NxV.argmax(1) == targets_N
    return (weights_N @ loss_N, weights_N @ correct_N), (
        d_logits_NxV @ table_VxD,
        d_logits_NxV.T @ hidden_NxD,
        d_logits_NxV.sum(0),
    )


def of_logits(logits_NxV, targets_N, weights_N=None, num_classes=None, chunk=2):
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


@pytest.mark.parametrize("weights", ["zero and one", "fractional"])
@pytest.mark.parametrize("chunk", [1, 4, 13, 256])
def test_value_and_gradients_equal_the_unfused(chunk, weights):
    """13 slots: a chunk each, a last chunk not full, one chunk, a chunk too large."""
    inputs = random_inputs(13, 11, weights)
    (value, correct), grads = fused(*inputs, num_classes=11, chunk=chunk)
    (want, want_correct), want_grads = reference(*inputs)
    assert abs(value - want) <= 1e-6 * want
    assert abs(correct - want_correct) <= 1e-6 * want_correct and want_correct > 0
    for grad, want_grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [4, 256])
def test_padding_of_the_vocabulary_has_probability_zero(chunk):
    """11 classes in a table of 16 rows give what a table of 11 rows gives, even where
    the other 5 would have the largest logits."""
    hidden_NxD, table_VxD, bias_V, targets_N, weights_N = random_inputs(
        13, 11, "zero and one"
    )
    padded_table_VxD = np.concatenate([table_VxD, np.full((5, 6), 3, np.float32)])
    padded_bias_V = np.concatenate([bias_V, np.full(5, 50, np.float32)])
    (value, correct), (d_hidden_NxD, d_table_VxD, d_bias_V) = fused(
        hidden_NxD,
        padded_table_VxD,
        padded_bias_V,
        targets_N,
        weights_N,
        num_classes=11,
        chunk=chunk,
    )
    assert_all_zero((d_table_VxD[11:], d_bias_V[11:]))
    (want, want_correct), want_grads = reference(
        hidden_NxD, table_VxD, bias_V, targets_N, weights_N
    )
    assert abs(value - want) <= 1e-6 * want
    assert correct == want_correct > 0
    grads = (d_hidden_NxD, d_table_VxD[:11], d_bias_V[:11])
    for grad, want_grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=2e-6)


def test_accuracy_counts_the_first_of_tied_logits_only():
    logits_NxV = [(1, 3, 3), (1, 3, 3), (3, 1, 0), (3, 1, 0), (0, 0, 9)]
    weights_N = [1, 1, 0.5, 1, 0]
    (_, correct), _ = of_logits(logits_NxV, [1, 2, 0, 1, 2], weights_N)
    assert correct == 1.5


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
    (value, correct), grads = fused(*inputs, num_classes=11, chunk=16)
    (want, want_correct), want_grads = reference(*inputs)
    assert value.dtype == correct.dtype == jnp.float32
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    assert abs(value - want) <= 1e-2 * want
    assert abs(correct - want_correct) <= 1e-2 * num_slots
    for grad, want_grad in zip(grads, want_grads, strict=True):
        error = np.abs(np.asarray(grad, np.float64) - want_grad).max()
        assert error <= 1e-2 * np.abs(want_grad).max()


@pytest.mark.parametrize("target, want", [(0, 0), (1, 2e4), (2, 1e4)])
def test_logits_of_ten_thousand_are_finite(target, want):
    (value, _), grads = of_logits([(1e4, -1e4, 0)], [target])
    assert abs(value - want) <= 1e-6 * want
    assert_all_finite(grads)


# ---- where there is nothing to predict ----------------------------------------------


def test_b34_no_target_gives_zero_and_zero_gradients():
    hidden_NxD, table_VxD, bias_V, targets_N, _ = random_inputs(13, 11, "fractional")
    weights_N = np.zeros(13, np.float32)
    result = fused(
        hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes=11, chunk=4
    )
    assert_all_zero(result)


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
    for name in ("loss", "num_correct", "grad_norm", "num_maskable", "mask_hash"):
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
        assert result[0] == want[0]
        (d_logits_NxV, *shared), (want_NxV, *want_shared) = result[1], want[1]
        assert_all_zero(d_logits_NxV[1])
        np.testing.assert_array_equal(d_logits_NxV[0], want_NxV[0])
        jax.tree.map(np.testing.assert_array_equal, shared, want_shared)


@pytest.mark.parametrize("label", [-100, -1, 4, 54])
def test_b42_weight_zero_wins_over_any_label(label):
    """V is 4, so the labels are -100, -1, V and V + 50."""
    assert_all_zero(of_logits([(1, 2, 3, 4)], [label], [0]))
    # Nor does it touch its neighbour in the chunk.
    result = of_logits([(1, 2, 3, 4), (2, 1, 0, 0)], [label, 0], [0, 1])
    want = of_logits([(0, 0, 0, 0), (2, 1, 0, 0)], [0, 0], [0, 1])
    jax.tree.map(np.testing.assert_array_equal, result[0], want[0])
    np.testing.assert_array_equal(result[1][0], want[1][0])


def checked_error(label, weight, num_classes=4):
    def value(targets_N, weights_N):
        table_VxD, bias_V = jnp.eye(4), jnp.zeros(4)
        hidden_NxD = jnp.ones((2, 4))
        return loss.masked_cross_entropy(
            hidden_NxD, table_VxD, bias_V, targets_N, weights_N, num_classes=num_classes
        )

    checked = jax.jit(checkify.checkify(value, errors=checkify.user_checks))
    error, _ = checked(jnp.array([0, label]), jnp.array([1.0, weight]))
    return error.get()


def test_b42_checks_refuse_a_label_that_counts():
    for label in (-100, -1, 4, 54):
        assert "outside [0, 4)" in checked_error(label, 1.0)
        assert checked_error(label, 0.0) is None
    assert checked_error(3, 1.0) is None
    # A row of the table that is padding is no class.
    assert "outside [0, 3)" in checked_error(3, 1.0, num_classes=3)


# ---- its size and its use -----------------------------------------------------------


def arrays_in(jaxpr):
    """Yields the shape of every intermediate array, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield tuple(getattr(variable.aval, "shape", ()))
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from arrays_in(inner)


def largest(fn, *args):
    """Returns the largest number of elements of an array in the gradient of `fn`."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=True))(*args)
    return max(int(np.prod(shape)) for shape in arrays_in(jaxpr.jaxpr))


def test_logits_are_never_whole():
    """64 rows of 16 tokens, all predicted, 128 columns: 1,024 x 128 whole logits; a
    chunk holds 256 x 128, and nothing else is as large."""
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
    assert largest(loss_fn, params, batch, jax.random.key(0)) == loss.CHUNK * 128

    def whole(params, batch, key):
        hidden_BxMxD, table_VxD, bias_V = model.apply(
            {"params": params}, slots, slots, slots, slots
        )
        logits_BxMxV = hidden_BxMxD @ table_VxD.T + bias_V[None, None]
        return jax.nn.logsumexp(logits_BxMxV), ()

    # The yardstick itself: it does see whole logits where there are some.
    assert largest(whole, params, batch, jax.random.key(0)) == 1024 * 128


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
