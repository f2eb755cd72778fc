"""Remat saves memory and changes no gradient; bfloat16 stays inside the computation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import config, step
from mlm_jax.model import encoder
from tests import helpers
from tests import test_executors as executors
from tests.test_mesh import build


@functools.cache
def compiled_gradient(remat, scan_unroll):
    """Returns (the compiled gradient of the loss, its arguments)."""
    model = helpers.tiny_model(num_layers=4, remat=remat, scan_unroll=scan_unroll)
    batch = helpers.make_batch(np.full((32, 16), 7))
    batch |= {
        "inputs": batch["tokens"],
        "predict": np.tile(np.arange(2), (32, 1)),
        "targets": np.full((32, 2), 7),
        "weights": np.ones((32, 2), np.float32),
    }
    loss_fn = step.make_loss_fn(model, 12, train=True)
    gradient = jax.jit(jax.grad(loss_fn, has_aux=True))
    arguments = helpers.random_params(model), batch, jax.random.key(0)
    return gradient.lower(*arguments).compile(), arguments


@pytest.mark.parametrize("scan_unroll", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_remat_saves_memory_and_changes_no_gradient(scan_unroll):
    memory, gradients = {}, {}
    for remat in encoder.REMAT:
        compiled, arguments = compiled_gradient(remat, scan_unroll)
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        gradients[remat], _ = compiled(*arguments)
    assert memory["full"] < memory["dots"] < memory["none"]
    for remat in ("dots", "full"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            gradients[remat],
            gradients["none"],
        )


@pytest.mark.slow
def test_bfloat16_leaves_state_and_sums_in_float32():
    """Only what is computed on the way is bfloat16."""
    built = build((1, 1, 1), **{"model.dtype": "bfloat16", "optim.name": "adamw"})
    hparams = config.hparams(executors.make_config())
    state = built.init(jax.random.key(0), hparams)
    state, metrics = built.train_step(state, executors.make_batch(0))
    leaves = jax.tree.leaves((state.params, state.opt_state, state.token_loss))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32
    exact = build((1, 1, 1), **{"optim.name": "adamw"})
    state = exact.init(jax.random.key(0), hparams)
    _, expected = exact.train_step(state, executors.make_batch(0))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=5e-3)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=5e-2)
    np.testing.assert_array_equal(metrics["mask_hash"], expected["mask_hash"])


def test_b44_parameters_keep_moving_in_bfloat16():
    """Updates too small for a bfloat16 of their parameter add up: 100 of 1e-4."""
    hparams = config.hparams(executors.make_config())
    moved = {}
    for dtype in ("float32", "bfloat16"):
        settings = {"model.dtype": dtype, "optim.name": "adamw"}
        built = build((1, 1, 1), **settings)
        numbers = hparams | {
            "peak_learning_rate": np.float32(1e-4),
            "warmup_steps": np.float32(0),
            "num_steps": np.float32(10_000),
        }
        state = built.init(jax.random.key(0), numbers)
        first = jax.device_get(state.params)
        for k in range(100):
            state, _ = built.train_step(state, executors.make_batch(k % 4))
        moved[dtype] = jax.tree.map(
            lambda now, then: np.abs(np.asarray(now) - then), state.params, first
        )
    deltas = np.concatenate([x.ravel() for x in jax.tree.leaves(moved["bfloat16"])])
    exact = np.concatenate([x.ravel() for x in jax.tree.leaves(moved["float32"])])
    used = exact > 0  # keys' biases have no gradient, nor do padded rows
    assert used.mean() > 0.8 and (deltas[used] > 0).mean() > 0.99
    np.testing.assert_allclose(deltas.max(), exact.max(), rtol=0.1)
