"""Updates whose loss or gradient is far out of the ordinary are not made."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import config, program, spikes, step
from mlm_jax.checkpoint import digest
from mlm_jax.errors import NonFiniteError
from tests import helpers
from tests.test_executors import COUNTS_V, FakeTokenizer, make_config, make_mesh
from tests.test_nonfinite import batch_of, make_log
from tests.test_train import step_metrics

SPIKE_ROW = 5


def seen(values, recent=None):
    recent = spikes.nothing_seen() if recent is None else recent
    for value in values:
        recent = spikes.remember(recent, {"loss": value, "grad_norm": 1.0})
    return recent


@pytest.mark.parametrize("num", [64, 128, 500])
def test_beyond_so_many_standard_deviations_of_the_last_128(num):
    values = np.random.default_rng(0).normal(5, 0.3, num).astype(np.float32)
    last = values[-128:].astype(np.float64)
    limit = last.mean() + 6 * last.std()
    recent = seen(values)
    for loss, expected in ((limit - 1e-3, False), (limit + 1e-3, True)):
        found = {"loss": loss, "grad_norm": 1.0}
        assert bool(spikes.is_spike(recent, found, 6.0)) is expected
    assert spikes.is_spike(recent, {"loss": 5.0, "grad_norm": 1.1}, 6.0)
    assert not spikes.is_spike(recent, {"loss": -100.0, "grad_norm": 0.1}, 6.0)
    assert not spikes.is_spike(recent, {"loss": np.nan, "grad_norm": np.nan}, 6.0)


def test_nothing_is_out_of_the_ordinary_before_64():
    values = np.random.default_rng(0).normal(5, 0.3, 63)
    assert not spikes.is_spike(seen(values), {"loss": 1e9, "grad_norm": 1e9}, 6.0)
    one_more = seen([5.0], seen(values))
    assert spikes.is_spike(one_more, {"loss": 1e9, "grad_norm": 1.0}, 6.0)


@functools.cache
def make_step(sigmas, clip_norm=1e9):
    """A compiled train step of SGD whose gradient is multiplied by 1,000 for a batch
    with row 5, and is NaN for one with row 105."""
    model = helpers.tiny_model()
    sound = step.make_loss_fn(model, 12, train=True)

    def loss_fn(params, batch, key, **regularisers):
        loss, sums = sound(params, batch, key)
        loss *= jnp.where((batch["row"] == SPIKE_ROW).any(), 1000.0, 1.0)
        bad = jnp.where((batch["row"] == SPIKE_ROW + 100).any(), jnp.nan, 0.0)
        return loss + bad * params["bias"].sum(), sums

    compiled = helpers.compile_train_step(
        corrupt=helpers.make_corrupt(),
        loss_fn=loss_fn,
        optimizer="sgd",
        schedule="constant",
    )
    numbers = {"spike_sigmas": sigmas} if sigmas else {}
    numbers = helpers.hparams(
        clip_norm=clip_norm, peak_learning_rate=1e-3, num_steps=1000.0, **numbers
    )
    state = helpers.make_state(helpers.random_params(model), "sgd", numbers)
    if sigmas:
        state = state.replace(recent=spikes.nothing_seen())
    return compiled, state


def run(compiled, state, first_rows):
    history = []
    for first in first_rows:
        state, found = compiled(state, batch_of(first))
        history.append(jax.device_get(found))
    return state, history


def test_r24_a_gradient_of_a_thousand_is_clipped():
    compiled, state = make_step(None, clip_norm=0.5)
    after, (found,) = run(compiled, state, [SPIKE_ROW])
    assert found["grad_norm"] > 100  # logged as it was
    moved = jax.tree.map(lambda a, b: a - b, after.params, state.params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(moved)))
    np.testing.assert_allclose(norm, 1e-3 * 0.5, rtol=1e-3)


def test_r24_a_spike_is_not_learned_from_whatever_nan_came_before():
    """Skipped, as is the NaN before it; neither enters the memory."""
    compiled, state = make_step(6.0)
    ordinary = list(range(200, 200 + 4 * 80, 4))
    state, history = run(compiled, state, ordinary)
    assert not any(found["is_spike"] for found in history)
    before = jax.device_get(state.replace(key=0))
    state, (bad, spike) = run(compiled, state, [SPIKE_ROW + 100, SPIKE_ROW])
    after = jax.device_get(state.replace(key=0))
    assert np.isnan(bad["grad_norm"]) and not bad["is_spike"]
    assert np.isfinite(spike["grad_norm"]) and spike["is_spike"]
    for name in ("params", "opt_state", "recent"):
        assert digest(getattr(after, name)) == digest(getattr(before, name)), name
    assert after.step == before.step + 2
    state, (found,) = run(compiled, state, [600])
    assert not found["is_spike"] and state.recent["count"] == 81
    assert digest(jax.device_get(state.params)) != digest(before.params)


def test_without_the_field_nothing_is_remembered():
    compiled, state = make_step(None)
    state, history = run(compiled, state, [*range(200, 200 + 4 * 70, 4), SPIKE_ROW])
    assert state.recent == {} and "is_spike" not in history[-1]


def test_spikes_are_told_of_and_counted_with_the_other_skips():
    """Under `on_nonfinite = stop`, too, which is about what is not finite."""
    stream = io.StringIO()
    log = make_log(stream, max_skips=2)
    rows = np.array([7, 9])
    with pytest.raises(NonFiniteError, match="spike at step 7: .* 3 in a row and 3 of"):
        for step_ in range(1, 20):
            is_spike = step_ in {5, 6, 7}
            log.add(step_, functools.partial(step_metrics, is_spike=is_spike), rows)
    assert stream.getvalue().count("skipped spike at step") == 2
    assert log._writer.steps == [4, 5, 6]


def test_a_config_without_sigmas_has_a_program_without_memory():
    for sigmas, expected in ((None, {}), (6.0, {"loss", "grad_norm", "count"})):
        c = make_config()
        c.optim.spike_sigmas = sigmas
        config.check(c)
        built = program.make_program(c, FakeTokenizer, COUNTS_V, make_mesh(1))
        assert set(built.abstract_state.recent) == set(expected)
