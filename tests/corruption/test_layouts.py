"""The same masks on any devices, however a batch is split, and after a resume.

The real training step runs under the real executors; only the model is missing. In its
place stands a loss that hands out, as sums, the corrupted rows that it is given.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import checkpoint, metrics, optim, parallel, step
from mlm_jax.corruption import settings
from mlm_jax.corruption.replace import Action
from tests import helpers
from tests.corruption.helpers import (
    COUNTS,
    STRATEGIES,
    VOCAB_SIZE,
    numbers,
    packed_batch,
    some_collocations,
)

NUM_ROWS, LENGTH, NUM_SLOTS, DUPLICATES = 16, 32, 12, 3
SAVED_STEP, NUM_STEPS = 2, 4
ROW_LEAVES = {  # what of a corrupted row is compared, and its width
    "inputs": LENGTH,
    "unit": LENGTH,
    "action": LENGTH,
    "predict": NUM_SLOTS,
    "targets": NUM_SLOTS,
    "weights": NUM_SLOTS,
}

# Each value of every axis that is compiled, some with each strategy.
PROGRAMS = {
    "token": dict(count="exact"),
    "word": dict(
        count="stochastic", token_weights="inverse_frequency", random_pool="unigram"
    ),
    "span": dict(count="bernoulli", random_pool="full_vocab"),
    "ngram": dict(count="stochastic", views=2),
    "pmi": dict(count="exact", token_weights="running_loss", random_pool="unigram"),
}
# The axes that are numbers: no program is compiled for them.
NUMBERS = {
    "plain": {},
    "static": {"dynamic": False, "duplicates": DUPLICATES},
    "schedule": {"schedule": "linear", "final_rate": 0.1},
    "row_rate": {"row_rate": (0.1, 0.3), "weighting": "inverse_rate"},
    "fewer_predictions": {"corruption_rate": 0.4, "prediction_rate": 0.1},
    "whole_units": {"replacement_unit": "unit", "min_predictions": 5},
}
# All strategies and each value of the other axes, one at a time.
AXES = [
    *(dict(count=count) for count in COUNTS),
    *(dict(count="stochastic", views=views) for views in (2, 3)),
    dict(count="stochastic", token_weights="inverse_frequency"),
    dict(count="stochastic", token_weights="running_loss"),
    dict(count="stochastic", random_pool="full_vocab"),
    dict(count="stochastic", random_pool="unigram"),
]

REFERENCE = ("jit", 1, 1)
PMAP, SHARD_MAP, JIT = ("pmap", 8, 2), ("shard_map", 4, 4), ("jit", 2, 2)
# Strategies share out the layouts beyond pmap: each pair is a compilation.
FAST = [(strategy, PMAP) for strategy in STRATEGIES]
FAST += zip(STRATEGIES, itertools.cycle([SHARD_MAP, JIT]), strict=False)
ALL = [
    (strategy, (mode, num_devices, num_microbatches))
    for strategy in STRATEGIES
    for mode in ("pmap", "shard_map", "jit")
    for num_devices in (1, 2, 4, 8)
    for num_microbatches in (1, 2, 4)
    if num_devices * num_microbatches <= NUM_ROWS
]


@functools.cache
def batches():
    """Rows A, other rows, rows A after as many epochs as static masks last, and rows A
    in the first epoch again, in another order."""
    first, second = (
        packed_batch(seed, NUM_ROWS, LENGTH) | {"place": np.arange(NUM_ROWS)}
        for seed in (0, 1)
    )
    later = first | {"epoch": first["epoch"] + DUPLICATES}
    again = jax.tree.map(lambda x: x[::-1], first)
    return first, second, later, again


def loss_of_rows(views):
    """Returns a loss function whose sums hold each row of the global batch, at its
    place. A row that is met twice, or by no one, shows."""

    def loss_fn(params, batch, key, **regularisers):
        del key, regularisers
        # The bits of weights too: as one array of integers it compiles fastest.
        leaves = [
            jax.lax.bitcast_convert_type(batch[name], jnp.int32) for name in ROW_LEAVES
        ]
        rows_BxC = jnp.concatenate(leaves, axis=1)
        all_rows = jnp.zeros((NUM_ROWS * views, rows_BxC.shape[1]), jnp.int32)
        is_used_N = batch["weights"].reshape(-1) > 0
        targets_N = batch["targets"].reshape(-1)
        # Whole numbers, and below a decay of 1/2: the running losses are then exact,
        # in whatever order they are added.
        losses_N = jnp.where(is_used_N, 1 + targets_N % 7, 0).astype(jnp.float32)
        zeros_V = jnp.zeros(VOCAB_SIZE)
        sums = {
            "rows": all_rows.at[batch["place"]].add(rows_BxC),
            "loss": losses_N.sum(),
            "weight": batch["weights"].sum(),
            "num_masked": is_used_N.sum(),
            "token_losses": zeros_V.at[targets_N].add(losses_N),
            "token_counts": zeros_V.at[targets_N].add(is_used_N),
        }
        return params["w"] * sums["weight"], sums

    return loss_fn


def by_name(rows_BxC):
    """Returns the leaves of the rows, as the loss was given them."""
    ends = np.cumsum(list(ROW_LEAVES.values()))
    leaves = np.split(rows_BxC, ends[:-1], axis=1)
    leaves = dict(zip(ROW_LEAVES, leaves, strict=True))
    return leaves | {"weights": leaves["weights"].view(np.float32)}


@functools.cache
def build(layout, strategy, axes):
    """Returns (train step, placement of its state); `axes` are items of a dict."""
    mode, num_devices, num_microbatches = layout
    policy = dict(views=1, num_slots=NUM_SLOTS) | dict(axes)
    views = policy["views"]
    corrupt_rows = helpers.make_corrupt(
        vocab_size=VOCAB_SIZE,
        strategy=strategy,
        collocations=some_collocations() if strategy == "pmi" else None,
        **policy,
    )

    def corrupt(*args):
        batch, ledger = corrupt_rows(*args)
        view_B = jnp.arange(len(batch["place"])) % views
        return batch | {"place": views * batch["place"] + view_B}, ledger

    mesh = parallel.make_mesh({"data": num_devices})
    shardings = parallel.state_shardings(make_state("plain", 1), [], mesh)
    train_step = functools.partial(
        step.train_step,
        corrupt=corrupt,
        loss_fn=loss_of_rows(views),
        optimizer=optim.OPTIMIZERS["sgd"],
        schedule=lambda update, hparams: hparams["peak_learning_rate"],
        num_microbatches=num_microbatches,
    )
    return parallel.compile_train_step(train_step, mode, mesh, shardings), shardings


def make_state(name, views, seed=0):
    """Returns the state before the first update, under the numbers of that name."""
    section = dict(rate=0.3, views=views, token_loss_decay=0.5) | NUMBERS[name]
    settings.check(helpers.corruption(**section))
    traced = numbers(**section, mask_frac=0.4, random_frac=0.4)
    params = {"w": jnp.float32(1)}
    hparams = helpers.hparams(num_steps=float(NUM_STEPS), **traced)
    # As NumPy arrays: a checkpoint loses weak types, and would compile again.
    hparams = jax.device_get(hparams)
    state = helpers.make_state(params, "sgd", hparams, seed)
    return state.replace(token_loss=jnp.full(VOCAB_SIZE, 4, jnp.float32))


def advance(layout, strategy, axes, state, first, last):
    """Returns (state, what the loss and the ledger saw at steps `first` … `last`)."""
    train_step, shardings = build(layout, strategy, tuple(axes.items()))
    state = jax.device_put(state, shardings)
    history = []
    for batch in batches()[first:last]:
        state, sums = train_step(state, batch)
        sums = jax.device_get(sums)
        ledger = {name: sums[name] for name in metrics.LEDGER}
        history.append(by_name(sums["rows"]) | ledger)
    return state, history


def numbers_of(axes):
    """Returns the names of the numbers that go with a program."""
    # Several views are for more predictions, not for fewer.
    views = axes.get("views", 1)
    return [name for name in NUMBERS if views == 1 or name != "fewer_predictions"]


def run(layout, strategy, axes, name, seed=0):
    state = make_state(name, axes.get("views", 1), seed)
    return advance(layout, strategy, axes, state, 0, NUM_STEPS)[1]


@functools.cache
def reference_of(strategy, axes, name):
    return run(REFERENCE, strategy, dict(axes), name)


def reference(strategy, axes, name):
    """The masks on one device, the batch in one piece."""
    return reference_of(strategy, tuple(axes.items()), name)


def assert_same_masks(history, expected_history):
    for seen, expected in zip(history, expected_history, strict=True):
        assert seen.keys() == expected.keys()
        for name, x in seen.items():
            np.testing.assert_array_equal(x, expected[name], err_msg=name)


def check_layout(layout, strategy, axes):
    for name in numbers_of(axes):
        history = run(layout, strategy, axes, name)
        assert_same_masks(history, reference(strategy, axes, name))


# ---- layouts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, layout",
    [
        pytest.param(
            *case, marks=() if case in FAST else pytest.mark.slow, id=str(case)
        )
        for case in ALL
    ],
)
def test_every_layout_hides_the_same(strategy, layout):
    """Positions, guises, targets, weights, units and ledger, bit for bit."""
    check_layout(layout, strategy, PROGRAMS[strategy])


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_hides_the_same_with_every_axis(strategy, axes):
    for layout in (PMAP, SHARD_MAP, JIT):
        check_layout(layout, strategy, axes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_are_of_the_seed_the_epoch_and_the_row(strategy):
    """Not of the step, nor of the place in the batch; static ones come again."""
    axes = PROGRAMS[strategy]
    for name in numbers_of(axes):
        first, other_rows, later, again = reference(strategy, axes, name)
        other_seed = run(REFERENCE, strategy, axes, name, seed=1)[0]
        for action in Action:
            assert (first["action"] == action).any()
        # The rate, or what was found hard, has moved on by then.
        is_moved = name == "schedule" or axes.get("token_weights") == "running_loss"
        for seen, is_same in (
            (other_rows, False),
            (other_seed, False),
            (later, name == "static" and not is_moved),
            (again, not is_moved),
        ):
            assert (seen["mask_hash"] == first["mask_hash"]) == is_same
            assert (seen["inputs"] == first["inputs"]).all() == is_same


# ---- resume -------------------------------------------------------------------------


def check_resume(layout, resumed_layout, strategy, axes, workdir):
    """A state that was saved and restored goes on as if it had not been."""
    for name in numbers_of(axes):
        expected = reference(strategy, axes, name)
        state = make_state(name, axes.get("views", 1))
        state, _ = advance(layout, strategy, axes, state, 0, SAVED_STEP)
        _, shardings = build(resumed_layout, strategy, tuple(axes.items()))
        abstract_state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            state,
            shardings,
        )
        with checkpoint.Checkpoints(workdir / name, keep=1) as checkpoints:
            checkpoints.save(SAVED_STEP, state)
            first, state = checkpoints.restore(abstract_state)
        _, rest = advance(resumed_layout, strategy, axes, state, first, NUM_STEPS)
        assert_same_masks(rest, expected[SAVED_STEP:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_hides_the_same_also_on_other_devices(strategy, tmp_path):
    check_resume(PMAP, REFERENCE, strategy, PROGRAMS[strategy], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_hides_the_same_with_every_axis(strategy, axes, tmp_path):
    check_resume(REFERENCE, SHARD_MAP, strategy, axes, tmp_path / "1")
    check_resume(SHARD_MAP, JIT, strategy, axes, tmp_path / "2")
