"""The whole policy: any rows, what masks depend on, recompilation, the ledger."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax import config, keys, metrics, program, step
from mlm_jax.corruption import policy, replace, units
from mlm_jax.corruption import settings as corruption_settings
from tests.corruption.helpers import (
    COUNTS,
    NUM_ROWS,
    STRATEGIES,
    assert_uniform,
    assert_within,
    begins_word,
    corrupt,
    hidden,
    is_maskable,
    numbers,
    ordinary_rows,
    packed_batch,
    predicted,
    some_collocations,
)
from tests.helpers import (
    CLS,
    MASK,
    NUM_SPECIAL,
    PAD,
    SEP,
    corruption,
    is_special,
    make_batch,
    make_corrupt,
)
from tests.test_executors import FakeTokenizer, make_config

# ---- where nothing may be hidden ----------------------------------------------------


def test_b01_padding_is_never_predicted():
    """Padding is known by its segment, and by its id should a segment contain it."""
    by_segment_BxL = ordinary_rows(NUM_ROWS, [5, 12] * (NUM_ROWS // 2))
    segment_BxL = (by_segment_BxL != PAD).astype(np.int32)
    by_segment_BxL[by_segment_BxL == PAD] = NUM_SPECIAL  # an ordinary id
    by_id_BxL = ordinary_rows(NUM_ROWS, [5, 12] * (NUM_ROWS // 2))

    for tokens_BxL, segments_BxL in (
        (by_segment_BxL, segment_BxL),
        (by_id_BxL, np.ones_like(segment_BxL)),
    ):
        # Two rows, visited in 500 epochs and more.
        batch = make_batch(
            tokens_BxL,
            segments_BxL,
            epoch=np.arange(NUM_ROWS) // 2,
            row=np.arange(NUM_ROWS) % 2,
        )
        for count in COUNTS:
            out, ledger = corrupt(batch, numbers(0.5), count=count)
            is_predicted_BxL = predicted(out)
            np.testing.assert_array_equal(hidden(out), is_predicted_BxL)
            assert not is_predicted_BxL[segment_BxL == 0].any()
            # Each real position is met, so the above is not for want of draws.
            for row in (0, 1):
                is_real_L = segment_BxL[row] > 0
                assert is_predicted_BxL[row::2].any(0)[is_real_L].all()
            assert ledger["num_maskable"] == segment_BxL.sum()


@pytest.mark.parametrize("strategy", ["token", "word"])
def test_b02_no_special_token_of_a_packed_row_is_predicted(strategy):
    tokens_L = [CLS, 5, 6, SEP, CLS, 7, 8, SEP, CLS, 9, 10, SEP] + [PAD] * 4
    segment_L = [1] * 4 + [2] * 4 + [3] * 4 + [0] * 4
    batch = make_batch(
        [tokens_L] * NUM_ROWS,
        [segment_L] * NUM_ROWS,
        epoch=np.arange(NUM_ROWS),
        row=np.full(NUM_ROWS, 7),
    )
    out, _ = corrupt(batch, numbers(0.9), strategy=strategy)
    is_predicted_BxL = predicted(out)
    np.testing.assert_array_equal(hidden(out), is_predicted_BxL)
    assert np.flatnonzero(is_predicted_BxL.any(0)).tolist() == [1, 2, 5, 6, 9, 10]
    assert (is_predicted_BxL.sum(1) == 5).all()  # 0.9 x 6, rounded


def test_b32_ids_come_from_the_vocabulary():
    """[PAD] is 7, [MASK] is 1, and id 0 is an ordinary word."""
    is_special_V = is_special(12, special_ids=(7, 1, 3, 5, 6))
    fn = make_corrupt(num_slots=8, mask_id=1, is_special_V=is_special_V)
    tokens_L = np.array([5, 0, 2, 0, 4, 6, 7, 7])
    segment_L = np.array([1, 1, 1, 1, 1, 1, 0, 0])
    batch = make_batch([tokens_L], [segment_L])
    out, _ = jax.device_get(jax.jit(fn)(jax.random.key(0), batch, numbers(1.0), 0.0))
    assert out["inputs"][0].tolist() == [5, 1, 1, 1, 1, 6, 7, 7]
    assert np.flatnonzero(predicted(out)[0]).tolist() == [1, 2, 3, 4]
    thresholds_V = replace.non_special(is_special_V, None).astype(float)
    shares_V = np.diff(thresholds_V, prepend=0) / 2**32
    np.testing.assert_allclose(shares_V, ~is_special_V / 7, atol=1e-9)


# ---- any rows -----------------------------------------------------------------------

VOCABULARIES = {  # name: (special ids [PAD] [UNK] [CLS] [SEP] [MASK], the pool)
    "specials first": ((0, 1, 2, 3, 4), "non_special"),
    "specials last": ((11, 12, 13, 14, 15), "unigram"),
    "specials scattered": ((7, 1, 3, 5, 9), "full_vocab"),
}
NUM_SLOTS = 9


@functools.cache
def compile_property(strategy, count, vocabulary):
    special_ids, random_pool = VOCABULARIES[vocabulary]
    return jax.jit(
        make_corrupt(
            strategy=strategy,
            collocations=some_collocations() if strategy == "pmi" else None,
            count=count,
            num_slots=NUM_SLOTS,
            random_pool=random_pool,
            mask_id=special_ids[-1],
            is_special_V=is_special(16, special_ids),
            counts_V=np.arange(16) % 5,
        )
    )


# Of strategies that differ in numbers only, one: n-grams are spans of other lengths.
DISTINCT = tuple({units.STRATEGIES[name]: name for name in STRATEGIES}.values())


@pytest.mark.parametrize("strategy", DISTINCT)
@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    count=st.sampled_from(COUNTS),
    rate=st.floats(2**-10, 1, width=32),
    share=st.sampled_from([1.0, 0.5, 0.125]),
    min_predictions=st.integers(0, 20),
    fracs=st.sampled_from([(0.8, 0.1), (1, 0), (0, 1), (0, 0), (0.3, 0.7)]),
    replacement_unit=st.sampled_from(["token", "unit"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_corruption_of_any_rows(
    strategy, count, rate, share, min_predictions, fracs, replacement_unit, seed
):
    # Strategies share out the vocabularies: each pair would be a compilation.
    vocabulary = sorted(VOCABULARIES)[DISTINCT.index(strategy) % 3]
    special_ids, random_pool = VOCABULARIES[vocabulary]
    is_special_V = is_special(16, special_ids)
    batch = packed_batch(seed, 16, 32, is_special_V, special_ids)
    hparams = numbers(
        rate,
        min_predictions,
        *fracs,
        strategy=strategy,
        replacement_unit=replacement_unit,
    )
    fn = compile_property(strategy, count, vocabulary)

    def run(rate, share=1.0):
        changed = {"rate": np.float32(rate), "predicted_share": np.float32(share)}
        return jax.device_get(
            fn(jax.random.key(seed), batch, hparams | changed, np.float32(0))
        )

    out, ledger = run(rate, share)
    is_hidden_BxL, is_predicted_BxL = hidden(out), predicted(out)
    is_maskable_BxL = is_maskable(batch, special_ids)

    # Only ordinary tokens, and those predicted are hidden.
    assert (is_hidden_BxL <= is_maskable_BxL).all()
    assert (is_predicted_BxL <= is_hidden_BxL).all()
    # Whole units, whole words.
    unit_BxL = out["unit"]
    np.testing.assert_array_equal(unit_BxL < 32, is_maskable_BxL)
    first_BxL = np.where(is_maskable_BxL, unit_BxL, np.arange(32)[None])
    for is_taken_BxL in (is_hidden_BxL, is_predicted_BxL):
        of_first_BxL = np.take_along_axis(is_taken_BxL, first_BxL, 1)
        np.testing.assert_array_equal(is_taken_BxL, of_first_BxL)
    if strategy != "token":
        goes_on_BxL = is_maskable_BxL & ~begins_word(batch, is_maskable_BxL)
        assert not (first_BxL == np.arange(32)[None])[goes_on_BxL].any()
    if replacement_unit == "unit":
        action_BxL = np.take_along_axis(out["action"], first_BxL, 1)
        np.testing.assert_array_equal(out["action"], action_BxL)

    # What is not hidden is untouched; targets are the originals.
    inputs_BxL, tokens_BxL = out["inputs"], batch["tokens"]
    np.testing.assert_array_equal(
        inputs_BxL[~is_hidden_BxL], tokens_BxL[~is_hidden_BxL]
    )
    np.testing.assert_array_equal(out["tokens"], tokens_BxL)
    is_used_BxM = out["weights"] == 1
    assert set(out["weights"].ravel()) <= {0, 1}
    original_BxM = np.take_along_axis(tokens_BxL, out["predict"], 1)
    np.testing.assert_array_equal(
        out["targets"][is_used_BxM], original_BxM[is_used_BxM]
    )
    changed = set(inputs_BxL[is_hidden_BxL & (inputs_BxL != tokens_BxL)])
    pool = set(range(16)) if random_pool == "full_vocab" else set()
    pool |= set(np.flatnonzero(~is_special_V)) | {special_ids[-1]}
    if random_pool == "unigram":
        pool -= {0, 5, 10}  # tokens that do not occur
    assert changed <= pool

    # No more than M, and what has no slot is counted.
    assert out["weights"].shape[1] == NUM_SLOTS >= is_predicted_BxL.sum(1).max()
    num_chosen = is_hidden_BxL.sum()
    if share < 1:  # predicted is what a lower rate hides
        fewer, fewer_ledger = run(np.float32(share) * np.float32(rate))
        assert (hidden(fewer) <= is_hidden_BxL).all()
        np.testing.assert_array_equal(predicted(fewer), is_predicted_BxL)
        assert fewer_ledger["num_overflow"] == ledger["num_overflow"]
        num_chosen = hidden(fewer).sum()
    assert is_predicted_BxL.sum() + ledger["num_overflow"] == num_chosen

    # How many: a minimum, and no unit begins beyond the budget.
    num_maskable_B = is_maskable_BxL.sum(1)
    num_hidden_B = is_hidden_BxL.sum(1)
    floor_B = np.minimum(min_predictions, num_maskable_B)
    assert (num_hidden_B >= floor_B).all()
    if count != "bernoulli":
        most_B = np.maximum(np.ceil(rate * num_maskable_B), floor_B)
        sizes_B = [np.unique(u[u < 32], return_counts=True)[1] for u in unit_BxL]
        longest_B = np.array([max(sizes, default=1) for sizes in sizes_B])
        assert (num_hidden_B <= most_B + longest_B - 1).all()

    # Nested: at a higher rate the same, in the same guise, and more.
    higher, _ = run(min(1, 1.5 * rate + 0.1))
    assert (is_hidden_BxL <= hidden(higher)).all()
    np.testing.assert_array_equal(
        inputs_BxL[is_hidden_BxL], higher["inputs"][is_hidden_BxL]
    )

    # The ledger.
    assert ledger["num_maskable"] == num_maskable_B.sum()
    assert ledger["num_hidden"] == num_hidden_B.sum()
    parts = ("num_mask_tokens", "num_random_tokens", "num_kept_tokens")
    assert sum(ledger[name] for name in parts) == num_hidden_B.sum()
    lengths = np.zeros(policy.MAX_UNIT, int)
    for b in range(16):
        hidden_units_L = unit_BxL[b][is_hidden_BxL[b]]
        sizes = np.unique(hidden_units_L, return_counts=True)[1]
        np.add.at(lengths, np.minimum(sizes, policy.MAX_UNIT) - 1, 1)
    np.testing.assert_array_equal(ledger["unit_lengths"], lengths)


# ---- a rate for each row, weights ---------------------------------------------------


def test_a_rate_for_each_row_is_uniform_and_may_weigh_inversely():
    length = 500  # so that the number hidden tells the rate
    batch = make_batch(ordinary_rows(1000, length, length=length))
    fn = jax.jit(make_corrupt(num_slots=length))

    def run(**changes):
        hparams = numbers(0.15, 0, row_rate=(0.2, 0.6), **changes)
        out, ledger = fn(jax.random.key(0), batch, hparams, 0.0)
        return jax.device_get(out["weights"]), jax.device_get(ledger)

    weights_BxM, ledger = run()
    assert set(weights_BxM.ravel()) == {0, 1}
    rate_B = weights_BxM.sum(1) / length
    assert ledger["num_overflow"] == 0
    assert 0.2 <= rate_B.min() < 0.204 and 0.596 < rate_B.max() <= 0.6
    histogram, _ = np.histogram(rate_B, np.linspace(0.1999, 0.6001, 11))
    assert_uniform(histogram)
    assert_within(rate_B.mean(), 0.4, 0.4 / np.sqrt(12 * 1000))

    inverse_BxM, _ = run(weighting="inverse_rate")
    np.testing.assert_array_equal(inverse_BxM > 0, weights_BxM > 0)
    # One number a row, the inverse of its rate: each row weighs the same.
    weight_B = inverse_BxM.max(1)
    is_used_BxM = inverse_BxM > 0
    np.testing.assert_array_equal(inverse_BxM, is_used_BxM * weight_B[:, None])
    np.testing.assert_allclose(weight_B * rate_B, 1, atol=0.006)


def test_a_constant_rate_weighs_inversely_too():
    batch = make_batch(ordinary_rows(NUM_ROWS, 16))
    out, _ = corrupt(batch, numbers(0.25, weighting="inverse_rate"))
    assert set(out["weights"].ravel()) == {0, 4}


def test_the_mean_loss_is_weighted():
    """sum(w l) / sum(w), in training and in what is reported; predictions are counted,
    not weighed."""

    class Model:
        def apply(self, variables, inputs, segment, position, predict, dropout_keys):
            hidden_BxMxD = jnp.ones((*predict.shape, 1))
            return hidden_BxMxD, variables["params"][:, None], jnp.zeros(3)

    params = jnp.array([0.0, 1.0, 2.0])
    names = ("inputs", "segment", "position")
    batch = {name: jnp.zeros((2, 2), jnp.int32) for name in names} | {
        "predict": jnp.zeros((2, 2), jnp.int32),
        "targets": jnp.array([[0, 1], [2, 0]]),
        "weights": jnp.array([[4.0, 4.0], [0.5, 0.0]]),
    }
    loss_fn = step.make_loss_fn(Model(), 3, train=False)
    loss, sums = loss_fn(params, batch, jax.random.key(0))
    losses_V = np.log(np.exp([0, 1, 2]).sum()) - np.array([0, 1, 2])
    want = 4 * losses_V[0] + 4 * losses_V[1] + 0.5 * losses_V[2]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert float(sums["weight"]) == 8.5 and int(sums["num_masked"]) == 3
    scalars = metrics.eval_scalars(jax.tree.map(float, sums) | {"mask_hash": 0}, 0.15)
    np.testing.assert_allclose(scalars["eval/loss@0.15"], want / 8.5, rtol=1e-6)
    np.testing.assert_allclose(scalars["eval/accuracy@0.15"], 0.5 / 8.5, rtol=1e-6)


def test_b10_the_effective_rate_is_the_configured_one():
    """40% at length 512: the slots are derived, and no one is told less."""
    for strategy in ("token", "span"):
        c = make_config(**{"data.row_length": 512, "corruption.strategy": strategy})
        assert c.corruption.rate == 0.4
        tokens_BxL = np.full((128, 512), 7)
        tokens_BxL[:, [0, -1]] = CLS, SEP
        batch = make_batch(tokens_BxL, word_start=np.arange(512) % 3 != 0)
        fn = jax.jit(program.train_corrupt(c, FakeTokenizer, np.ones(60)))
        hparams = corruption_settings.hparams(c.corruption)
        out, ledger = jax.device_get(fn(jax.random.key(0), batch, hparams, 0.0))
        assert out["predict"].shape[1] >= 204
        assert ledger["num_overflow"] == 0
        assert abs(ledger["num_hidden"] / ledger["num_maskable"] - 0.4) < 0.002
        assert (out["weights"] > 0).sum() == ledger["num_hidden"]


# ---- what masks depend on -----------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_b12_masks_differ_between_epochs_and_a_second_run_is_equal(count):
    tokens_BxL = ordinary_rows(NUM_ROWS, 16)
    runs = [
        corrupt(make_batch(tokens_BxL, epoch=epoch), numbers(0.4), count=count)
        for epoch in (0, 1, 0)
    ]
    first, second, again = (predicted(out) for out, _ in runs)
    assert (first == second).all(1).mean() < 0.01
    jax.tree.map(np.testing.assert_array_equal, runs[0], runs[2])
    # Rows of one epoch do not share their masks either, nor do two seeds.
    assert (first[:-1] == first[1:]).all(1).mean() < 0.01
    other = predicted(
        corrupt(make_batch(tokens_BxL), numbers(0.4), count=count, seed=1)[0]
    )
    assert (first == other).all(1).mean() < 0.01


def test_b12_row_r_of_epoch_e_is_not_row_e_of_epoch_r():
    """Keys that were added or xor-ed, not folded one into the other, would be."""
    epoch_B, row_B = np.divmod(np.arange(64), 8)
    row_keys = keys.row_keys(jax.random.key(0), epoch_B, row_B)
    assert len(np.unique(jax.random.key_data(row_keys), axis=0)) == 64


def test_b12_a_rows_mask_is_its_own():
    """Not of the batch's size, its order, or the neighbours."""
    batch = packed_batch(0, 64, 32)
    hparams = numbers(0.4, 1, 0.4, 0.4, strategy="span")
    run = functools.partial(corrupt, strategy="span", count="stochastic", num_slots=32)
    whole, _ = run(batch, hparams)
    names = ("inputs", "predict", "targets", "weights", "unit", "action")

    def check(rows, out):
        for name in names:
            np.testing.assert_array_equal(out[name], whole[name][rows])

    shuffled = np.random.default_rng(0).permutation(64)
    for rows in (shuffled, np.array([41, 3])):
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        check(rows, run(part, hparams)[0])

    others = packed_batch(1, 64, 32)
    for name, leaf in others.items():
        leaf = leaf.copy()
        leaf[41] = batch[name][41]
        others[name] = leaf
    out, _ = run(others, hparams)
    for name in names:
        np.testing.assert_array_equal(out[name][41], whole[name][41])


@pytest.mark.parametrize("strategy", ["token", "span"])
def test_a_mask_does_not_depend_on_what_the_tokens_are(strategy):
    """On the row's id, not on its text: only which positions are ordinary counts, and
    where words start."""
    hparams = numbers(0.4, mask_frac=0.4, random_frac=0.6, strategy=strategy)
    one, other = (
        corrupt(
            make_batch(
                ordinary_rows(64, 16, seed=seed), word_start=np.arange(16) % 3 == 0
            ),
            hparams,
            strategy=strategy,
        )[0]
        for seed in (0, 1)
    )
    is_hidden_BxL = hidden(one)
    np.testing.assert_array_equal(is_hidden_BxL, hidden(other))
    np.testing.assert_array_equal(
        one["inputs"][is_hidden_BxL], other["inputs"][is_hidden_BxL]
    )


def test_purposes_keep_their_numbers_and_share_no_key():
    assert {purpose.name: purpose.value for purpose in keys.Purpose} == {
        "INIT": 0,
        "CORRUPTION": 1,
        "DROPOUT": 2,
    }
    key = jax.random.key(0)
    purpose_keys = jnp.stack([keys.purpose_key(key, p) for p in keys.Purpose])
    assert len(np.unique(jax.random.key_data(purpose_keys), axis=0)) == 3


def test_static_masks_come_again_after_their_duplicates_and_dynamic_ones_never():
    batch = make_batch(ordinary_rows(64, 16))
    split = dict(mask_frac=0.4, random_frac=0.5)
    static = numbers(0.4, dynamic=False, duplicates=3, **split)

    def inputs(epoch, hparams):
        out, ledger = corrupt(batch | {"epoch": np.full(64, epoch, np.int32)}, hparams)
        return out["inputs"], int(ledger["mask_hash"])

    statics = [inputs(epoch, static) for epoch in range(9)]
    dynamics = [inputs(epoch, numbers(0.4, **split)) for epoch in range(9)]
    for epoch in range(9):
        np.testing.assert_array_equal(statics[epoch][0], statics[epoch % 3][0])
    # The hash, which does not cover the epoch, says so too.
    assert len({hash_ for _, hash_ in statics}) == 3
    assert len({hash_ for _, hash_ in dynamics}) == 9
    np.testing.assert_array_equal(statics[2][0], dynamics[2][0])
    once = numbers(0.4, dynamic=False, duplicates=1, **split)
    assert {inputs(epoch, once)[1] for epoch in range(4)} == {statics[0][1]}


def test_b13_the_exams_masks_depend_on_its_seed_its_rate_and_the_row_alone():
    batch = make_batch(ordinary_rows(64, np.arange(64) % 17, vocab_size=60))

    @functools.cache
    def compiled(**overrides):
        c = make_config(**{n.replace("__", "."): v for n, v in overrides.items()})
        config.check(c)
        return c, jax.jit(program.eval_corrupt(c, FakeTokenizer))

    def run(rate=0.15, exam_seed=0, batch=batch, **overrides):
        c, fn = compiled(**overrides)
        hparams = program.eval_hparams(c, rate)
        out, ledger = fn(jax.random.key(exam_seed), batch, hparams, np.float32(0))
        return int(ledger["mask_hash"]), int((out["weights"] > 0).sum())

    one = run()
    for overrides in (
        {"corruption__rate": 0.15, "seed": 9, "eval__rates": (0.15, 0.8)}
        | {"corruption__strategy": "span", "corruption__count": "bernoulli"}
        | {"corruption__views": 2, "corruption__min_predictions": 5}
        | {"corruption__random_pool": "full_vocab", "corruption__mask_frac": 0.1}
        | {"corruption__dynamic": False, "corruption__duplicates": 2},
        {"corruption__schedule": "linear", "corruption__final_rate": 0.1}
        | {"corruption__replacement_unit": "unit", "corruption__random_frac": 0.2}
        | {"corruption__corruption_rate": 0.4, "corruption__prediction_rate": 0.1},
        {"corruption__row_rate": (0.1, 0.9), "corruption__weighting": "inverse_rate"},
    ):
        assert run(**overrides) == one, overrides
    assert run(rate=0.1)[0] != one[0]
    assert run(exam_seed=1)[0] != one[0]
    assert run(batch=batch | {"row": batch["row"] + 1})[0] != one[0]
    num_tokens_B = np.arange(64) % 17
    want_B = np.maximum(np.round(np.float32(0.15) * num_tokens_B), num_tokens_B > 0)
    assert one[1] == want_B.sum()


# ---- one compilation ----------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, count", [("token", "stochastic"), ("span", "exact")]
)
def test_one_compilation_for_every_number(strategy, count):
    """8 rates x 6 splits x 3 seeds; schedules, row rates, lengths, replacement units,
    minima, static masks. Some are compared with a compilation of their own."""
    num_traces = 0
    fn = make_corrupt(strategy=strategy, count=count, num_slots=32)

    def traced(key, batch, hparams, progress):
        nonlocal num_traces
        num_traces += 1
        return fn(key, batch, hparams, progress)

    compiled = jax.jit(traced)
    batch = packed_batch(5, 32, 32)
    cases = [
        (seed, 0.5, numbers(rate, 1, *split, strategy=strategy))
        for rate in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)
        for split in [(0.8, 0.1), (1, 0), (0, 1), (0, 0), (0.5, 0.5), (0.3, 0.3)]
        for seed in range(3)
    ]
    linear = {"schedule": "linear", "final_rate": 0.9}
    others = [
        linear,
        linear | {"schedule": "cosine", "schedule_end": 0.75},
        linear | {"schedule": "step", "schedule_end": 0.5},
        linear | {"schedule_begin": 0.4, "schedule_end": 0.9},
        {"row_rate": (0.1, 0.9)},
        {"row_rate": (0.1, 0.9), "weighting": "inverse_rate"},
        {"replacement_unit": "unit"},
        {"min_predictions": 9},
        {"corruption_rate": 0.4, "prediction_rate": 0.1},
        {"span_max": 2, "ngram_max": 2},
        {"span_lengths": "uniform"},
        {"dynamic": False, "duplicates": 2},
    ]
    cases += [
        (0, 0.5, numbers(**{"rate": 0.15, "mask_frac": 0.5, "random_frac": 0.3} | case))
        for case in others
    ]
    results = []
    for seed, progress, hparams in cases:
        out, ledger = compiled(jax.random.key(seed), batch, hparams, progress)
        results.append(jax.device_get((out, ledger)))
    assert num_traces == 1
    # And yet every number was heard.
    heard = {
        (int(ledger["mask_hash"]), out["weights"].tobytes()) for out, ledger in results
    }
    # To single tokens lengths and units of replacement are nothing.
    deaf = 0 if strategy == "span" else 2
    assert len(heard) == len(cases) - deaf

    for case in (40, len(cases) - 8):
        seed, progress, hparams = cases[case]
        # Its numbers are constants of this program.
        alone = jax.jit(functools.partial(fn, hparams=hparams, progress=progress))
        want = jax.device_get(alone(jax.random.key(seed), batch))
        jax.tree.map(np.testing.assert_array_equal, results[case], want)


# ---- the ledger's hash --------------------------------------------------------------


def python_hash(row, position, token):
    """The hash of one hidden position, in Python's integers."""
    state = 0
    for value in (row, position, token):
        state = ((state ^ value) + 0x9E3779B9) % 2**32
        state = (state ^ (state >> 16)) * 0x85EBCA6B % 2**32
        state = (state ^ (state >> 13)) * 0xC2B2AE35 % 2**32
        state ^= state >> 16
    return state


def test_mask_hash_is_a_sum_over_hidden_positions():
    batch = make_batch(ordinary_rows(64, 16), epoch=2)
    hparams = numbers(0.4, mask_frac=0.3, random_frac=0.4)
    out, ledger = corrupt(batch, hparams)
    want = sum(
        python_hash(row, position, int(out["inputs"][row, position]))
        for row, position in np.argwhere(hidden(out)).tolist()
    )
    assert int(ledger["mask_hash"]) == want % 2**32


def test_mask_hash_does_not_see_how_rows_are_dealt_out():
    batch = make_batch(ordinary_rows(64, 16))
    hparams = numbers(0.4, mask_frac=0.3, random_frac=0.4)

    def hash_of(rows, seed=0):
        part = jax.tree.map(lambda x: x[rows], batch)
        return int(corrupt(part, hparams, seed=seed)[1]["mask_hash"])

    whole = hash_of(np.arange(64))
    shuffled = np.random.default_rng(0).permutation(64)
    assert hash_of(shuffled) == whole
    parts = [hash_of(shuffled[i::4]) for i in range(4)]
    assert sum(parts) % 2**32 == whole
    assert hash_of(np.arange(64), seed=1) != whole


def test_mask_hash_sees_every_change():
    batch = {"epoch": np.array([0, 0]), "row": np.array([0, 1])}
    inputs_BxL = np.full((2, 4), MASK)
    action_BxL = np.array([[1, 0, 3, 0], [0, 2, 0, 0]])

    def hash_of(batch, inputs_BxL, action_BxL):
        return int(policy.mask_hash(batch, inputs_BxL, action_BxL))

    other_inputs_BxL, other_action_BxL = inputs_BxL.copy(), action_BxL.copy()
    other_inputs_BxL[0, 2] = 9
    other_action_BxL[0] = [0, 1, 3, 0]
    hashes = [
        hash_of(batch, inputs_BxL, action_BxL),
        hash_of(batch, other_inputs_BxL, action_BxL),
        hash_of(batch, inputs_BxL, other_action_BxL),
        hash_of(batch | {"row": np.array([2, 1])}, inputs_BxL, action_BxL),
    ]
    assert len(set(hashes)) == len(hashes)
    # At a position that is not hidden there is nothing to see, nor in the epoch.
    other_inputs_BxL = inputs_BxL.copy()
    other_inputs_BxL[0, 1] = 9
    assert hash_of(batch, other_inputs_BxL, action_BxL) == hashes[0]
    other = batch | {"epoch": np.array([1, 0])}
    assert hash_of(other, inputs_BxL, action_BxL) == hashes[0]


# ---- weights of tokens --------------------------------------------------------------


def test_rare_tokens_are_hidden_more_often():
    """Of `make_corrupt`'s vocabulary token v occurs v times: weights 1 / (1 + v)."""
    batch = make_batch(np.tile(np.arange(5, 12), (NUM_ROWS, 2))[:, :14])
    out, ledger = corrupt(
        batch,
        numbers(0.1, 0, weight_power=1.0),
        token_weights="inverse_frequency",
        count="bernoulli",
    )
    share_L = hidden(out).mean(0)
    weight_L = 1 / (1 + np.tile(np.arange(5, 12), 2))
    want_L = 0.1 * weight_L / weight_L.mean()
    for share, want in zip(share_L, want_L, strict=True):
        assert_within(share, want, np.sqrt(want * (1 - want) / NUM_ROWS))
    assert abs(ledger["num_hidden"] / ledger["num_maskable"] - 0.1) < 0.002
    # A power of 0 makes them alike.
    even, _ = corrupt(
        batch,
        numbers(0.1, 0, weight_power=0.0),
        token_weights="inverse_frequency",
        count="bernoulli",
    )
    plain, _ = corrupt(batch, numbers(0.1, 0), count="bernoulli")
    np.testing.assert_array_equal(hidden(even), hidden(plain))


def test_the_corruption_helper_takes_only_fields_that_exist():
    with pytest.raises((KeyError, AttributeError)):
        corruption(rte=0.1)
