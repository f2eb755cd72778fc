"""What an exam adds up to, against plain NumPy and by hand."""

import functools
import io

import jax
import numpy as np
import pytest

from mlm_jax import exam, frozen_masks, parallel, program
from mlm_jax.corruption.units import STRATEGIES
from mlm_jax.data import pipeline
from mlm_jax.data.tokenizer import Vocabulary
from mlm_jax.errors import InputError
from mlm_jax.held_out import evaluate
from mlm_jax.tasks import answers
from mlm_jax.tasks.answers import Answers
from tests.helpers import make_batch
from tests.reading import make_tokenizer
from tests.test_executors import COUNTS_V, VOCAB_SIZE, make_config
from tests.test_held_out import FakeRows, fresh_params

NUM_ROWS = 13


class Store:
    """As much of a row store as an exam needs."""

    fingerprint = "0123"
    tokenizer = Vocabulary(VOCAB_SIZE)
    validation = FakeRows(NUM_ROWS)


def some_answers(num=500, seed=0):
    rng = np.random.default_rng(seed)
    confidence_N = rng.uniform(0.01, 1, num)
    confidence_N[:3] = 1.0  # the last bin has its upper end
    is_correct_N = rng.random(num) < confidence_N**2
    return Answers(
        losses_N=np.where(is_correct_N, -np.log(confidence_N), rng.uniform(1, 9, num)),
        ranks_N=np.where(is_correct_N, 0, rng.integers(1, 12, num)),
        top_losses_N=-np.log(confidence_N),
        targets_N=rng.integers(0, 50, num),
        position_N=rng.integers(1, 30, num),
        part_N=rng.integers(0, 3, num),
    )


def test_calibration_equals_a_loop():
    found = some_answers()
    confidence_N = np.exp(-found.top_losses_N)
    expected, bins = 0.0, []
    for b in range(15):
        low, high = b / 15, (b + 1) / 15
        here = (confidence_N >= low) & ((confidence_N < high) | (b == 14))
        if here.sum():
            gap = abs((found.ranks_N[here] == 0).mean() - confidence_N[here].mean())
            expected += gap * here.sum() / len(here)
            bins.append(here.sum())
    result = answers.calibration(found)
    assert result["expected_calibration_error"] == pytest.approx(expected, rel=1e-12)
    assert [b["num_predictions"] for b in result["bins"]] == bins
    assert sum(bins) == 500 and 0.05 < expected < 0.3


def test_calibration_by_hand():
    """Four predictions of confidence 0.5, one of them right: the error is 0.25."""
    quarter = some_answers(4)._replace(
        ranks_N=np.array([0, 1, 2, 3]), top_losses_N=np.full(4, np.log(2))
    )
    result = answers.calibration(quarter)
    assert result["expected_calibration_error"] == pytest.approx(0.25)
    (only,) = result["bins"]
    assert (only["from"], only["to"]) == (7 / 15, 8 / 15)


def test_groups_equal_a_loop():
    found = some_answers()
    counts_V = np.random.default_rng(1).integers(0, 3000, 50)
    counts_V[:4] = [0, 1, 9, 10]
    report = answers.report(found, counts_V, np.ones(50, int))

    def group_of(value, base):
        if value < 1:
            return "0"
        low = base ** int(np.floor(np.log(value) / np.log(base) + 1e-9))
        return f"{low:,}" if base * low - 1 == low else f"{low:,} to {base * low - 1:,}"

    groups = {
        "by_frequency": [group_of(counts_V[t], 10) for t in found.targets_N],
        "by_position": [group_of(p, 2) for p in found.position_N],
        "by_part": [answers.PARTS[p] for p in found.part_N],
    }
    for table, names in groups.items():
        for line in report[table]:
            here = np.array([name == line["group"] for name in names])
            assert line["num_predictions"] == here.sum() > 0
            assert line["loss"] == pytest.approx(found.losses_N[here].mean())
            assert line["accuracy"] == pytest.approx((found.ranks_N[here] == 0).mean())
        assert sum(line["num_predictions"] for line in report[table]) == 500
    assert report["loss"] == pytest.approx(found.losses_N.mean())
    assert report["top5"] == pytest.approx((found.ranks_N < 5).mean())


def test_bits_per_byte_by_hand():
    """ "wor" and "##ld" of one word, "is" of another: 3, 2 and 2 bytes. Losses of 1, 2
    and 4 bits are 7 bits on 7 bytes."""
    found = some_answers(3)._replace(
        losses_N=np.log(2) * np.array([1.0, 2.0, 4.0]), targets_N=np.array([0, 1, 2])
    )
    report = answers.report(found, np.ones(3, int), np.array([3, 2, 2]))
    assert report["num_bytes"] == 7
    assert report["bits_per_byte"] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_bytes_of_pieces_are_those_of_the_text(kind):
    """Whatever the tokenizer, the same text has the same bytes: white space apart."""
    tokenizer = make_tokenizer(kind)
    for text in (
        "hello wide world, the world",
        "hello wide and the world",
        "the  word is\nhello",
        "wordlo hellorld",
    ):
        (encoded,) = tokenizer.encode([text])
        assert not tokenizer.is_special[encoded.tokens].any()
        num_bytes = tokenizer.byte_lengths[encoded.tokens].sum()
        assert num_bytes == len("".join(text.split()).encode())
        later_T = tokenizer.continues_word[encoded.tokens]
        # At the start of a text a byte-level word has no space; of `unigram` a comma
        # is in the word before it, and still nothing that a word goes on with.
        if kind != "bpe" and "," not in text:
            assert (later_T == ~encoded.word_start).all()
    assert (tokenizer.byte_lengths[tokenizer.is_special] == 0).all()


def test_bytes_of_byte_level_pieces_are_bytes():
    """Not characters: é is two, each of which is a piece of its own."""
    tokenizer = make_tokenizer("bpe")
    (encoded,) = tokenizer.encode(["e\u0142"])
    assert tokenizer.byte_lengths[encoded.tokens].sum() == len("e\u0142".encode())


def test_parts_of_words_by_hand():
    # [CLS] one two ##b ##c [SEP] [CLS] ##d one [PAD]: ##d follows a special token.
    batch = make_batch(
        [[2, 5, 6, 7, 8, 3, 2, 9, 5, 0]], [[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]]
    )
    starts = [0, 1, 1, 0, 0, 0, 0, 0, 1, 0]
    batch["word_start"] = np.array([starts], bool)
    is_special_V = np.arange(10) < 5
    part_L = answers.parts(batch, is_special_V)[0]
    assert [answers.PARTS[part_L[i]] for i in (1, 2, 3, 4, 7, 8)] == [
        *("whole word", "first piece", "later piece", "later piece"),
        *("whole word", "whole word"),
    ]


@functools.cache
def config_of_exams(folder):
    return make_config(**{"data.cache_dir": folder, "eval.num_rows": 0})


@pytest.fixture(scope="module")
def c(tmp_path_factory):
    return config_of_exams(str(tmp_path_factory.mktemp("exam")))


def masks(c, strategy="token", rate=0.15, **settings):
    return frozen_masks.masks(c, Store, strategy=strategy, rate=rate, **settings)


@functools.cache
def predict_on(devices):
    mesh = parallel.make_mesh({"data": devices}, jax.devices()[:devices])
    model = program.model_of(make_config(), VOCAB_SIZE)
    return answers.make_predict(model, VOCAB_SIZE, mesh)


def answer(rows, batch_size=4, devices=1):
    return answers.answer(
        predict_on(devices),
        fresh_params(),
        rows,
        is_special_V=Store.tokenizer.is_special,
        batch_size=batch_size,
    )


def test_b13_the_frozen_masks_are_those_of_training(c):
    """The same hash and the same sums as the evaluation step's."""
    found = masks(c)
    mesh = parallel.make_mesh({"data": 1}, jax.devices()[:1])
    program_ = program.make_program(c, Store.tokenizer, COUNTS_V, mesh)
    batches = pipeline.eval_batches(
        Store.validation, num_rows=0, batch_size=4, pad_id=0
    )
    sums = evaluate(
        program_.eval_step,
        fresh_params(),
        batches,
        jax.random.key(c.eval.seed),
        program.eval_hparams(c, 0.15),
    )
    assert found.mask_hash == sums["mask_hash"]
    report = answers.report(answer(found.rows), np.ones(60, int), np.ones(60, int))
    assert report["num_predictions"] == sums["num_masked"]
    assert report["loss"] == pytest.approx(sums["loss"] / sums["weight"], rel=1e-6)
    assert report["accuracy"] == pytest.approx(sums["num_correct"] / sums["weight"])
    assert report["top5"] == pytest.approx(sums["num_top5"] / sums["weight"])


def test_b13_masks_are_found_again_and_do_not_depend_on_training(c, tmp_path):
    found = masks(c)
    (path,) = [p for p in frozen_paths(c) if np.load(p)["mask_hash"] == found.mask_hash]
    before = path.stat().st_mtime_ns
    again = masks(c)
    assert path.stat().st_mtime_ns == before and again.mask_hash == found.mask_hash
    # Elsewhere, made anew, for a run trained otherwise.
    other = make_config(
        **{
            "data.cache_dir": str(tmp_path),
            "eval.num_rows": 0,
            "corruption.rate": 0.3,
            "corruption.strategy": "span",
            "seed": 5,
        }
    )
    made = masks(other)
    assert made.mask_hash == found.mask_hash
    for name, x in made.rows.items():
        np.testing.assert_array_equal(x, found.rows[name])
    assert masks(c, rate=0.4).mask_hash != found.mask_hash


def frozen_paths(c):
    import pathlib

    return sorted((pathlib.Path(c.data.cache_dir) / "masks").glob("*.npz"))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "pmi"])
def test_every_strategy_hides_its_share_in_whole_units(c, strategy):
    rows = masks(c, strategy, 0.4).rows
    is_used = rows["weights"] > 0
    maskable = (rows["segment"] > 0) & ~Store.tokenizer.is_special[rows["tokens"]]
    share = is_used.sum() / maskable.sum()
    assert 0.25 < share < 0.6
    hidden = np.zeros(rows["tokens"].shape, bool)
    at = np.nonzero(is_used)
    hidden[at[0], rows["predict"][at]] = True
    assert not (hidden & ~maskable).any()
    if strategy != "token":  # a later piece is hidden with the piece before it
        later = answers.parts(rows, Store.tokenizer.is_special) == 2
        before = np.pad(hidden, [(0, 0), (1, 0)])[:, :-1]
        assert (hidden == before)[later & maskable].all()


@pytest.mark.parametrize("damage", ["cut", "changed", "text"])
def test_damaged_masks_are_refused(c, damage, tmp_path):
    other = make_config(**{"data.cache_dir": str(tmp_path), "eval.num_rows": 0})
    masks(other)
    (path,) = frozen_paths(other)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "text":
        path.write_text("masks")
    else:
        with np.load(path) as file:
            arrays = dict(file)
        arrays["inputs"][0, 1] += 1
        arrays["predict"][0, 0] = 1
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        path.write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="not as it was written.*; remove it"):
        masks(other)


@pytest.mark.parametrize("batch_size, devices", [(1, 1), (13, 1), (64, 1), (8, 8)])
def test_b70_b71_batch_size_padding_and_devices_change_no_figure(
    c, batch_size, devices
):
    rows = masks(c, rate=0.4).rows
    alone, other = answer(rows), answer(rows, batch_size, devices)
    counts_V, lengths_V = np.arange(60), np.arange(60)
    a, b = (answers.report(x, counts_V, lengths_V) for x in (alone, other))
    a, b = (jax.tree_util.tree_leaves(x) for x in (a, b))
    for x, y in zip(a, b, strict=True):
        assert x == (pytest.approx(y, rel=1e-5) if isinstance(x, float) else y)


@pytest.mark.parametrize(
    "settings, message",
    [
        (((0.15, 1.5), ("token",), None), r"rates \(0.15, 1.5\); expected a tuple"),
        (((0.15,), ("words",), None), "strategy 'words'; expected one of token, word"),
        (((0.15,), ("pmi",), None), "pmi needs a list"),
        (((0.15,), ("token",), "pmi.txt"), "pmi needs a list"),
    ],
)
def test_exams_that_there_are_none_of_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        exam.check(*settings)
