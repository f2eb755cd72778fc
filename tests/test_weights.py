"""Tokens hidden by weight: in proportion, at the same rate, and part of the state."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import config, program
from mlm_jax.corruption import select, settings, weights
from tests.test_executors import FakeTokenizer, make_batch, make_config, make_mesh

NUM_ROWS = 20_000


def hidden_share(weight_L, rate, count="exact"):
    """Returns how often each position of a row of single tokens is taken."""
    length = len(weight_L)
    unit_L = jnp.arange(length)

    def row(key):
        order_key, draw_key = jax.random.split(key)
        order = select.order_units(order_key, unit_L, jnp.asarray(weight_L))
        draws = jax.random.uniform(draw_key, (2,))
        taken_L = select.chosen(
            draws, order, rate=jnp.float32(rate), min_predictions=0, count=count
        )
        return jnp.zeros(length).at[order.position_L].set(taken_L)

    keys = jax.random.split(jax.random.key(0), NUM_ROWS)
    return np.asarray(jax.jit(jax.vmap(row))(keys).mean(0))


@pytest.mark.parametrize("count", select.COUNTS)
def test_inclusion_is_proportional_to_weight_and_meets_the_rate(count):
    weight_L = np.array([1, 1, 2, 4] * 10, np.float32)
    share_L = hidden_share(weight_L, 0.1, count)
    expected_L = 0.1 * weight_L / weight_L.mean()
    # Sequential Poisson sampling meets proportions nearly, and a fixed count exactly.
    np.testing.assert_allclose(share_L, expected_L, rtol=0.12)
    assert share_L.mean() == pytest.approx(0.1, abs=0.001)


def test_equal_weights_change_nothing():
    flat_L = np.ones(16, np.float32)
    np.testing.assert_array_equal(
        hidden_share(flat_L, 0.3), hidden_share(5 * flat_L, 0.3)
    )


def test_inverse_frequency_is_one_over_one_more_than_the_count():
    table_V = weights.inverse_frequency(np.array([0, 1, 9]), {})
    np.testing.assert_allclose(table_V, [1, 0.5, 0.1])


def test_the_running_loss_moves_only_where_there_was_a_prediction():
    moved_V = weights.updated(
        jnp.array([4.0, 4.0, 4.0]),
        jnp.array([2.0, 0.0, 6.0]),
        jnp.array([1, 0, 3]),
        0.9,
    )
    np.testing.assert_allclose(moved_V, [0.9 * 4 + 0.1 * 2, 4, 0.9 * 4 + 0.1 * 2])


def test_the_running_loss_lives_in_the_state_and_is_the_same_on_any_devices():
    """It starts at ln V everywhere and follows what was predicted, summed over all."""
    states = []
    for devices, microbatches in ((1, 1), (4, 2)):
        c = make_config(
            **{
                "corruption.token_weights": "running_loss",
                "corruption.token_loss_decay": 0.5,
                "parallel.microbatches": microbatches,
            }
        )
        built = program.make_program(
            c, FakeTokenizer, np.ones(FakeTokenizer.vocab_size), make_mesh(devices)
        )
        state = built.init(jax.random.key(0), config.hparams(c))
        np.testing.assert_allclose(state.token_loss, math.log(128), rtol=1e-6)
        for k in range(3):
            state, _ = built.train_step(state, make_batch(k))
        states.append(jax.device_get(state.token_loss))
    np.testing.assert_allclose(states[0], states[1], rtol=1e-5)
    is_moved_V = ~np.isclose(states[0], math.log(128), rtol=1e-4)
    assert is_moved_V[5 : FakeTokenizer.vocab_size].mean() > 0.5
    assert not is_moved_V[:5].any() and not is_moved_V[FakeTokenizer.vocab_size :].any()


def test_the_power_sharpens_and_zero_is_uniform():
    c = make_config(**{"corruption.token_weights": "inverse_frequency"})
    counts_V = np.arange(FakeTokenizer.vocab_size)
    corrupt = jax.jit(program.train_corrupt(c, FakeTokenizer, counts_V))
    uniform = jax.jit(program.train_corrupt(make_config(), FakeTokenizer, counts_V))
    numbers = settings.hparams(c.corruption)
    batch = make_batch(0, num_rows=512)

    def mean_hidden_id(corrupt, power):
        out, _ = corrupt(
            jax.random.key(0), batch, numbers | {"weight_power": np.float32(power)}, 0.0
        )
        return np.asarray(out["targets"])[np.asarray(out["weights"]) > 0].mean()

    flat = mean_hidden_id(uniform, 0)
    assert mean_hidden_id(corrupt, 0) == pytest.approx(flat, rel=0.02)
    # A token's count is its id here: rarer tokens have smaller ids.
    assert mean_hidden_id(corrupt, 2) < mean_hidden_id(corrupt, 1) < flat - 1
