"""A loss or gradient that is not a finite number never changes the state."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from mlm_jax import metrics, optim, parallel, schedules, step, training
from mlm_jax.checkpoint import digest
from mlm_jax.errors import NonFiniteError
from tests import helpers
from tests.test_train import FakeWriter, step_metrics

BAD_ROW = 5


@functools.cache
def make_step(mode, num_devices, optimizer, broken):
    """A compiled train step whose loss or gradient is NaN for a batch with row 5, and
    what makes its first state."""
    model = helpers.tiny_model()
    sound = step.make_loss_fn(model, 12, train=True, per_token=True)

    def loss_fn(params, batch, key, **regularisers):
        loss, sums = sound(params, batch, key)
        bad = jnp.where((batch["row"] == BAD_ROW).any(), jnp.nan, 0.0)
        if broken == "loss":
            return loss + bad, sums | {"loss": loss + bad}
        return loss + bad * params["bias"].sum(), sums  # the loss itself is reported

    def schedule(update, hparams):
        scale = schedules.scale(
            update, schedule="constant", warmup_steps=0.0, num_steps=9.0, decay_begin=0
        )
        return hparams["peak_learning_rate"] * scale

    train_step = functools.partial(
        step.train_step,
        corrupt=helpers.make_corrupt(token_weights="running_loss"),
        loss_fn=loss_fn,
        optimizer=optim.OPTIMIZERS[optimizer],
        schedule=schedule,
    )
    mesh = parallel.make_mesh({"data": num_devices})
    params = helpers.random_params(model)
    state = helpers.make_state(params, optimizer, helpers.hparams(weight_decay=0.1))
    state = state.replace(token_loss=jnp.ones_like(params["bias"]))
    shardings = parallel.state_shardings(state, [], mesh)
    compiled = parallel.compile_train_step(train_step, mode, mesh, shardings)
    place = jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=shardings)
    return compiled, functools.partial(place, state)


def batch_of(first_row):
    tokens_BxL = np.random.default_rng(first_row).integers(5, 12, (4, 16))
    return helpers.make_batch(tokens_BxL, row=np.arange(first_row, first_row + 4))


@pytest.mark.parametrize(
    "mode, num_devices, optimizer, broken",
    [
        ("jit", 1, "adamw", "loss"),
        ("pmap", 2, "adamw", "gradient"),
        ("shard_map", 2, "sgd", "loss"),
        pytest.param("shard_map", 4, "adamw", "gradient", marks=pytest.mark.slow),
        pytest.param("jit", 2, "adamw", "gradient", marks=pytest.mark.slow),
        pytest.param("pmap", 4, "sgd", "loss", marks=pytest.mark.slow),
    ],
)
def test_r23_the_state_stays_bit_by_bit_and_the_next_step_goes_on(
    mode, num_devices, optimizer, broken
):
    compiled, first_state = make_step(mode, num_devices, optimizer, broken)
    state = first_state()
    # Moments of both signs, zeros and minus zeros among them.
    opt_state = jax.tree.map(
        lambda x: x.at[..., ::3].set(-0.0) if x.ndim else x, state.opt_state
    )
    state = state.replace(opt_state=opt_state)
    state, _ = compiled(state, batch_of(10))
    before = jax.device_get(state.replace(key=0))
    state, found = compiled(state, batch_of(3))  # rows 3 to 6
    after = jax.device_get(state.replace(key=0))
    assert np.isfinite(found["loss"]) == (broken == "gradient")
    assert np.isfinite(found["grad_norm"]) == (broken == "loss")
    assert after.step == before.step + 1
    for name in ("params", "opt_state", "token_loss"):
        kept, was = getattr(after, name), getattr(before, name)
        assert digest(kept) == digest(was), name  # by bits, so zeros keep their sign

    state, found = compiled(state, batch_of(10))
    assert np.isfinite(found["loss"]) and np.isfinite(found["grad_norm"])
    assert digest(state.params) != digest(before.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_a_parameter_that_is_not_finite_is_noticed_on_the_step():
    compiled, first_state = make_step("jit", 1, "adamw", "loss")
    state = first_state()
    state.params["bias"] = state.params["bias"].at[7].set(jnp.inf)
    _, found = compiled(state, batch_of(10))
    assert not np.isfinite([found["loss"], found["grad_norm"]]).all()


def make_log(stream=None, **changes):
    c = tiny.get_config()
    c.log.every_steps = 4
    c.optim.num_steps = 100
    c.optim.update(changes)
    progress = metrics.Progress(100, stream or io.StringIO())
    return training.TrainLog(FakeWriter(), progress, c)


@pytest.mark.parametrize("broken", [{"loss": np.nan}, {"grad_norm": np.inf}])
def test_r23_stop_is_the_default_and_says_all(broken):
    """The loop flushes the log before each save, so a save never comes after."""
    log = make_log()
    log.add(16, step_metrics, np.arange(3))
    log.add(17, functools.partial(step_metrics, **broken), np.array([40, 2, 31]))
    with pytest.raises(NonFiniteError) as caught:
        log.flush()
    text = str(caught.value)
    assert "step 17: loss " in text and "rows [40, 2, 31]" in text
    assert f"loss {broken.get('loss', 1.0)}" in text
    assert f"gradient norm {broken.get('grad_norm', 1.0)}" in text
    assert "\n" not in text and NonFiniteError.exit_code == 3


def test_r23_skip_goes_on_up_to_a_limit_in_a_row():
    stream = io.StringIO()
    log = make_log(stream, on_nonfinite="skip", max_skips=2)
    rows = np.arange(2)
    with pytest.raises(NonFiniteError, match="step 7: .* 3 in a row and 3 of 7 since"):
        for step_ in range(1, 20):
            loss = np.nan if step_ in {5, 6, 7} else 1.0
            log.add(step_, functools.partial(step_metrics, loss=loss), rows)
    assert stream.getvalue().count("skipped step") == 2
    writer = log._writer
    assert writer.ledger_steps == list(range(1, 7))
    assert writer.steps == [4, 5, 6]  # those skipped, and what is due anyway


def test_r23_skip_goes_on_up_to_one_percent():
    log = make_log(on_nonfinite="skip", max_skips=2)
    stops = "step 450: .* 1 in a row and 5 of 450 since"
    with pytest.raises(NonFiniteError, match=stops):
        for step_ in range(1, 1000):
            is_bad = step_ in {10, 20, 300, 400, 450}
            loss = np.nan if is_bad else 1.0
            log.add(step_, functools.partial(step_metrics, loss=loss), np.arange(2))
