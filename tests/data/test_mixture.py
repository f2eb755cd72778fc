"""Several sources as one: exact shares, and a batch is a function of its number."""

import collections
import fractions

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax.data import rows
from mlm_jax.data.mixture import Cycle, MixedRows, shares
from mlm_jax.data.pipeline import TrainBatches, eval_batches
from mlm_jax.errors import InputError
from tests.texts import data_config


@pytest.mark.parametrize(
    "weights, expected",
    [
        (["1"], [1]),
        (["0.7"], [1]),
        (["0.7", "0.3"], [7, 3]),
        (["2", "2", "4"], [1, 1, 2]),
        (["0.1", "0.25"], [2, 5]),
        (["0.3333", "0.6667"], [3333, 6667]),
    ],
)
def test_shares_are_the_weights_in_smallest_numbers(weights, expected):
    assert shares([fractions.Fraction(weight) for weight in weights]) == expected


def test_weights_that_would_make_a_very_long_cycle_are_refused():
    weights = [fractions.Fraction("0.33333333"), fractions.Fraction("0.66666667")]
    with pytest.raises(InputError, match=r"repeat after 100,000,000 rows only"):
        shares(weights)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 10**12))
@settings(max_examples=100, deadline=None)
def test_every_turn_has_exactly_the_shares_evenly_spread(counts, far):
    cycle, length = Cycle(counts), sum(counts)
    source_P, before_P = cycle.at(np.arange(3 * length))
    seen = collections.Counter()
    for place, (source, before) in enumerate(zip(source_P, before_P, strict=True)):
        assert before == seen[source]
        seen[source] += 1
        for s, count in enumerate(counts):
            assert abs(seen[s] - (place + 1) * count / length) < len(counts) / 2 + 0.5
        if (place + 1) % length == 0:
            turns = (place + 1) // length
            assert seen == {s: turns * count for s, count in enumerate(counts)}
    source, before = cycle.at(np.array([far * length]))
    assert source[0] == source_P[0] and before[0] == far * counts[source[0]]


class FakeRows:
    """Row i of split s holds the token 1000·s + i; lengths differ in number."""

    row_length = 12

    def __init__(self, split, size):
        self.split, self.size = split, size

    def __len__(self):
        return self.size

    def read(self, ids_N):
        assert ((ids_N >= 0) & (ids_N < self.size)).all()
        tokens_NxL = np.repeat((1000 * self.split + ids_N)[:, None], 12, axis=1)
        lengths_NxS = np.tile([[12], [6, 6], [4, 4, 4]][self.split], (len(ids_N), 1))
        return {
            "tokens": tokens_NxL.astype(np.int32),
            "segment_lengths": lengths_NxS.astype(np.int32),
            "word_start": tokens_NxL % 2 == 0,
        }


SIZES, SHARES = (30, 7, 100), (5, 3, 2)


def mixed():
    return MixedRows([FakeRows(s, size) for s, size in enumerate(SIZES)], SHARES)


def test_rows_are_read_from_where_they_are():
    ids = np.array([136, 0, 30, 36, 29, 37, 0])
    found = mixed().read(ids)
    expected = [2099, 0, 1000, 1006, 29, 2000, 0]
    assert found["tokens"][:, 0].tolist() == expected
    lengths = [[4, 4, 4], [12, 0, 0], [6, 6, 0], [6, 6, 0], [12, 0, 0], [4, 4, 4]]
    assert found["segment_lengths"].tolist() == [*lengths, [12, 0, 0]]
    assert len(mixed()) == 137


def test_each_source_has_its_share_and_epochs_of_its_own():
    batches = TrainBatches(mixed(), batch_size=20, seed=3)
    seen = [batches[k] for k in range(60)]
    for batch in seen:
        split_B = batch["tokens"][:, 0] // 1000
        assert np.bincount(split_B, minlength=3).tolist() == [10, 6, 4]
    tokens = np.concatenate([batch["tokens"][:, 0] for batch in seen])
    epoch = np.concatenate([batch["epoch"] for batch in seen])
    row = np.concatenate([batch["row"] for batch in seen])
    starts = np.array([0, 30, 37])
    np.testing.assert_array_equal(row, starts[tokens // 1000] + tokens % 1000)
    for split, size in enumerate(SIZES):
        is_split = tokens // 1000 == split
        np.testing.assert_array_equal(
            epoch[is_split], np.arange(is_split.sum()) // size
        )
        for e in range(int(epoch[is_split].max())):
            ids = tokens[is_split & (epoch == e)] % 1000
            assert sorted(ids) == list(range(size))
    orders = [tuple(tokens[(tokens // 1000 == 1) & (epoch == e)]) for e in range(20)]
    assert len(set(orders)) == 20


def test_sources_of_one_size_are_shuffled_apart():
    rows_ = MixedRows([FakeRows(0, 50), FakeRows(1, 50)], [1, 1])
    tokens = TrainBatches(rows_, batch_size=100, seed=0)[0]["tokens"][:, 0]
    assert (tokens[0::2] != tokens[1::2] - 1000).mean() > 0.9
    alone = TrainBatches(FakeRows(0, 50), batch_size=50, seed=0)[0]["tokens"][:, 0]
    np.testing.assert_array_equal(tokens[0::2], alone)


@pytest.mark.parametrize("batch_size", [6, 10, 24])
def test_any_batch_first_and_any_number_of_processes(batch_size):
    whole = TrainBatches(mixed(), batch_size=batch_size, seed=42)
    stream = [whole[k] for k in range(40)]
    tokens = np.concatenate([batch["tokens"] for batch in stream])
    other = TrainBatches(mixed(), batch_size=2 * batch_size, seed=42)
    joined = np.concatenate([other[k]["tokens"] for k in range(20)])
    np.testing.assert_array_equal(joined, tokens)
    for k in (39, 0, 17, 2, 25):
        fresh = TrainBatches(mixed(), batch_size=batch_size, seed=42)[k]
        parts = [
            TrainBatches(
                mixed(),
                batch_size=batch_size,
                seed=42,
                process_index=p,
                num_processes=2,
            )[k]
            for p in range(2)
        ]
        for name, array in stream[k].items():
            np.testing.assert_array_equal(fresh[name], array)
            np.testing.assert_array_equal(whole[k][name], array)
            halves = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(halves, array)


def test_evaluation_reads_every_row_of_all_sources_once():
    batches = eval_batches(mixed(), num_rows=0, batch_size=10, pad_id=9)
    found = np.concatenate([batch["row"] for batch in batches])
    assert sorted(found[found >= 0]) == list(range(137))


# --- the store of a mixture ----------------------------------------------------------

TOKENIZER = {
    "kind": "wordpiece",
    "vocab_size": 300,
    "max_characters": 10**8,
    "lowercase": True,
    "strip_accents": True,
    "file": None,
}


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for name, words in {"a": "one two three four", "b": "five six seven"}.items():
        lines = [" ".join(rng.choice(words.split(), 20)) for _ in range(100)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    source = f"0.7 files:{tmp_path}/a.txt + 0.3 files:{tmp_path}/b.txt"
    return data_config(tmp_path, source=source, row_length=16)


def quiet(line):
    del line


def test_a_mixture_is_its_sources_under_one_tokenizer(data, tmp_path):
    log = []
    store = rows.prepare(data, TOKENIZER, log=quiet)
    pieces = {store.tokenizer.piece(i) for i in range(store.tokenizer.vocab_size)}
    assert {"one", "seven"} <= pieces
    batch = TrainBatches(store.train, batch_size=100, seed=0)[0]
    is_a = batch["row"] < len(store.train.splits[0])
    assert is_a.sum() == 70
    assert store.stats["documents"] == 200
    assert store.token_counts.sum() == 16 * len(store.train)

    found = rows.find(data, store.fingerprint)
    for mine, theirs in zip(found, (store.train, store.validation), strict=True):
        ids = np.arange(len(theirs))
        for name, array in theirs.read(ids).items():
            np.testing.assert_array_equal(mine.read(ids)[name], array)
        mine.verify()

    weighted = data["source"].replace("0.7", "0.2")
    other = rows.prepare(data | {"source": weighted}, TOKENIZER, log=log.append)
    assert all("; found in" in line for line in log) and len(log) == 2
    assert other.fingerprint != store.fingerprint
    assert other.tokenizer.digest == store.tokenizer.digest


def test_a_mixture_of_one_is_that_source(data, tmp_path):
    one = data | {"source": f"files:{tmp_path}/a.txt"}
    weighted = data | {"source": f"0.4 files:{tmp_path}/a.txt"}
    first = rows.prepare(one, TOKENIZER, log=quiet)
    assert rows.prepare(weighted, TOKENIZER, log=quiet).fingerprint == first.fingerprint


def test_a_source_too_small_is_named(data, tmp_path):
    (tmp_path / "b.txt").write_text("five six seven")
    with pytest.raises(
        InputError, match=r"b.txt has 1 document and 10 tokens: too lit"
    ):
        rows.prepare(data, TOKENIZER, log=quiet)
