"""Evaluation: exact means over every row, under masks that no run can change."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import config, metrics, program
from mlm_jax.data import pipeline
from mlm_jax.held_out import evaluate, unigram_entropy
from tests.test_executors import (
    COUNTS_V,
    FakeTokenizer,
    make_batch,
    make_config,
    make_mesh,
)


class FakeRows:
    """`num_rows` rows with lengths of their own, in the form of `data.rows.Rows`."""

    def __init__(self, num_rows, length=16):
        batch = make_batch(0, num_rows, length)
        self._tokens_NxL = batch["tokens"]
        self._lengths_Nx1 = batch["segment"].sum(1, keepdims=True)
        self.row_length = length

    def __len__(self):
        return len(self._tokens_NxL)

    def read(self, ids_N):
        tokens_NxL = self._tokens_NxL[ids_N]
        return {
            "tokens": tokens_NxL,
            "segment_lengths": self._lengths_Nx1[ids_N],
            "word_start": tokens_NxL > 4,
        }


@functools.cache
def built(devices, rates=(0.15,), train_rate=0.4):
    c = make_config(**{"eval.rates": rates, "corruption.rate": train_rate})
    return c, program.make_program(c, FakeTokenizer, COUNTS_V, make_mesh(devices))


@functools.cache
def fresh_params():
    c, program_ = built(1)
    state = program_.init(jax.random.key(0), config.hparams(c))
    return jax.device_get(state.params)


def sums_of(rows, batch_size, devices=1, rate=0.15, seed=0, **settings):
    c, program_ = built(devices, **settings)
    batch_size = -(-batch_size // devices) * devices
    batches = pipeline.eval_batches(rows, num_rows=0, batch_size=batch_size, pad_id=0)
    key = jax.random.key(seed)
    return evaluate(
        program_.eval_step, fresh_params(), batches, key, program.eval_hparams(c, rate)
    )


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 6])
@pytest.mark.parametrize("num_rows", [1, 12, 13, 16])
def test_b70_each_row_counts_exactly_once(num_rows, batch_size, devices):
    rows = FakeRows(num_rows)
    sums = sums_of(rows, batch_size, devices)
    maskable_N = (rows.read(np.arange(num_rows))["tokens"] > 4).sum(1)
    predictions_N = np.maximum(np.round(0.15 * maskable_N), 1)
    assert sums["num_masked"] == predictions_N.sum()
    assert sums["num_maskable"] == maskable_N.sum()
    alone = sums_of(rows, 1)  # a row at a time, none of them padding
    assert sums["mask_hash"] == alone["mask_hash"]
    np.testing.assert_allclose(sums["loss"], alone["loss"], rtol=1e-6)


def test_frozen_masks_depend_on_nothing_of_training():
    """Only the exam's seed and rate matter: not the training rate, nor other rates."""
    rows = FakeRows(13)
    one = sums_of(rows, 4)
    assert one == sums_of(rows, 4)
    other = sums_of(rows, 4, rates=(0.15, 0.5), train_rate=0.15)
    assert other["mask_hash"] == one["mask_hash"]
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-6)
    assert sums_of(rows, 4, seed=1)["mask_hash"] != one["mask_hash"]
    assert sums_of(rows, 4, rate=0.1)["mask_hash"] != one["mask_hash"]


def test_b22_a_fresh_model_scores_the_size_of_its_vocabulary():
    """Only selected positions are scored, so an untrained model knows nothing."""
    sums = sums_of(FakeRows(64), 4)
    perplexity = metrics.perplexity(sums["loss"] / sums["weight"])
    vocab_size = FakeTokenizer.vocab_size
    assert 0.95 * vocab_size < perplexity < 1.05 * vocab_size
    assert sums["num_correct"] / sums["weight"] < 0.2


def test_b71_perplexity_is_of_the_total_mean():
    sums = [
        {"loss": 2.0 * 10, "weight": 10.0},
        {"loss": 4.0 * 30, "weight": 30.0},
    ]
    batches = iter(sums)

    def eval_step(params, batch, key, hparams):
        values = next(batches) | {
            "num_correct": 0.0,
            "num_top5": 0.0,
            "num_masked": 9,
            "mask_hash": 1,
        }
        return {name: jnp.asarray(value) for name, value in values.items()}

    total = evaluate(eval_step, None, [0, 1], None, None)
    scalars = metrics.eval_scalars(total, 0.15)
    assert scalars["eval/loss@0.15"] == 3.5
    assert scalars["eval/perplexity@0.15"] == pytest.approx(33.115, abs=1e-3)
    assert metrics.perplexity(1e9) == math.inf


def test_b71_the_batch_size_does_not_show():
    rows = FakeRows(64)
    losses = [sums_of(rows, size)["loss"] for size in (1, 4, 6)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_hash_wraps_as_32_bits():
    def eval_step(params, batch, key, hparams):
        return {"mask_hash": jnp.uint32(2**32 - 1), "loss": jnp.float32(1)}

    assert evaluate(eval_step, None, [0, 1], None, None)["mask_hash"] == 2**32 - 2


def test_unigram_entropy_by_hand():
    is_special_V = np.array([True, False, False, False])
    batches = [
        {"tokens": np.array([[0, 1, 1, 2]])},
        {"tokens": np.array([[0, 0, 3, 3]])},
    ]
    p = np.array([2, 1, 2]) / 5
    assert unigram_entropy(batches, is_special_V) == pytest.approx(
        -(p * np.log(p)).sum()
    )
