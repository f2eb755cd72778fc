"""A batch is a function of its number."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_jax.data.pipeline import TrainBatches, eval_batches, place, prefetch
from mlm_jax.errors import InputError

PAD = 9


class FakeRows:
    """Row i holds the token i and has one to three segments."""

    row_length = 12

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def read(self, ids_N):
        assert ((ids_N >= 0) & (ids_N < self.size)).all()
        lengths = np.array([[12, 0, 0], [5, 4, 0], [3, 4, 5], [3, 3, 3]], np.int32)
        tokens_NxL = np.repeat(ids_N[:, None], 12, axis=1).astype(np.int32)
        return {
            "tokens": tokens_NxL,
            "segment_lengths": lengths[ids_N % 4],
            "word_start": tokens_NxL % 2 == 0,
        }


def test_segments_and_positions_by_hand():
    batch = eval_batches(FakeRows(4), num_rows=0, batch_size=4, pad_id=PAD)[0]
    expected = {
        0: ([1] * 12, list(range(12))),
        1: ([1] * 5 + [2] * 4 + [0] * 3, [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]),
        2: ([1] * 3 + [2] * 4 + [3] * 5, [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]),
        3: ([1] * 3 + [2] * 3 + [3] * 3 + [0] * 3, [0, 1, 2] * 3 + [0] * 3),
    }
    for n, row in enumerate(batch["row"]):
        segment, position = expected[int(row)]
        assert batch["segment"][n].tolist() == segment
        assert batch["position"][n].tolist() == position


def test_smaller_batches_first_read_the_same_order():
    """Two of 2 rows, one of 4, then 6 each: nothing is left out, nothing read twice."""
    ramp = ((2, 2), (1, 4))
    places = [place(k, 6, ramp) for k in range(5)]
    assert places == [(0, 2), (2, 2), (4, 4), (8, 6), (14, 6)]
    rows = FakeRows(7)
    ramped = TrainBatches(rows, batch_size=6, seed=3, ramp=ramp)
    single = TrainBatches(rows, batch_size=1, seed=3)
    ids = [int(single[k]["row"][0]) for k in range(20)]
    for (first, size), k in zip(places, range(5), strict=True):
        assert ramped[k]["row"].tolist() == ids[first : first + size]
        halves = [
            TrainBatches(
                rows, batch_size=6, seed=3, ramp=ramp, process_index=i, num_processes=2
            )[k]["row"].tolist()
            for i in range(2)
        ]
        assert sum(halves, []) == ramped[k]["row"].tolist()


def test_a_batch_has_the_promised_arrays():
    train = TrainBatches(FakeRows(7), batch_size=3, seed=0)[5]
    held_out = eval_batches(FakeRows(7), num_rows=0, batch_size=3, pad_id=PAD)[2]
    for batch in (train, held_out):
        assert list(batch) == "tokens segment position word_start row epoch".split()
        for name, array in batch.items():
            is_row = name in ("row", "epoch")
            assert array.shape == ((3,) if is_row else (3, 12)), name
            assert array.dtype == (bool if name == "word_start" else np.int32), name


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(size, batch_size, seed):
    batches = TrainBatches(FakeRows(size), batch_size=batch_size, seed=seed)
    count = -(-3 * size // batch_size)
    seen = [batches[k] for k in range(count)]
    rows = np.concatenate([batch["row"] for batch in seen])
    epochs = np.concatenate([batch["epoch"] for batch in seen])
    np.testing.assert_array_equal(epochs, np.arange(len(epochs)) // size)
    for epoch in range(3):
        assert sorted(rows[epochs == epoch]) == list(range(size))
    tokens = np.concatenate([batch["tokens"][:, 0] for batch in seen])
    np.testing.assert_array_equal(tokens, rows)


def test_epochs_and_seeds_are_shuffled_differently():
    def order(seed, epoch):
        return TrainBatches(FakeRows(50), batch_size=50, seed=seed)[epoch][
            "row"
        ].tolist()

    orders = [tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    philox = np.random.Generator(np.random.Philox(key=[2, 1]))
    assert list(orders[7]) == philox.permutation(50).tolist()


@pytest.mark.parametrize("size, batch_size", [(37, 8), (10, 4), (8, 4), (5, 5)])
def test_r03_b57_b60_b61_from_any_state_comes_the_same_tail(size, batch_size):
    """Three epochs and more; a state is a position, at the end of an epoch, too."""
    whole = TrainBatches(FakeRows(size), batch_size=batch_size, seed=42)
    count = -(-3 * size // batch_size) + 1
    stream = [whole[k] for k in range(count)]
    for start in range(count):
        fresh = TrainBatches(FakeRows(size), batch_size=batch_size, seed=42)
        for k in range(start, count):
            for name, array in fresh[k].items():
                np.testing.assert_array_equal(array, stream[k][name])
    for k in reversed(range(count)):  # and without a drift
        np.testing.assert_array_equal(whole[k]["row"], stream[k]["row"])
    epochs = [row for batch in stream for row in batch["row"]]
    assert epochs[:size] != epochs[2 * size : 3 * size]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 6])
def test_b12_processes_read_slices_of_one_global_batch(num_processes):
    alone = TrainBatches(FakeRows(10), batch_size=6, seed=1)
    parts = [
        TrainBatches(
            FakeRows(10),
            batch_size=6,
            seed=1,
            process_index=p,
            num_processes=num_processes,
        )
        for p in range(num_processes)
    ]
    for k in range(8):
        slices = [part[k] for part in parts]
        for name, array in alone[k].items():
            joined = np.concatenate([batch[name] for batch in slices])
            np.testing.assert_array_equal(joined, array)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch_size=5 must be a multiple of 2"):
        TrainBatches(FakeRows(10), batch_size=5, seed=0, num_processes=2)


@pytest.mark.parametrize("size", [1, 12, 13, 14, 15, 16])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 6, 32])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 100])
def test_b70_every_evaluation_row_exactly_once(size, batch_size, num_rows):
    settings = {"num_rows": num_rows, "batch_size": batch_size, "pad_id": PAD}
    batches = eval_batches(FakeRows(size), **settings)
    wanted = min(num_rows or size, size)
    assert len(batches) == -(-wanted // batch_size) == len(list(batches))
    rows = np.concatenate([batch["row"] for batch in batches])
    real = rows[rows >= 0]
    assert len(real) == len(set(real)) == wanted
    assert len(rows) == len(batches) * batch_size and (rows[wanted:] == -1).all()
    last = batches[len(batches) - 1]
    filler = last["row"] == -1
    assert (last["tokens"][filler] == PAD).all()
    for name in ("segment", "position", "word_start", "epoch"):
        assert not last[name][filler].any()
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_evaluation_rows_do_not_depend_on_the_batch_size():
    def rows(num_rows, batch_size):
        settings = {"num_rows": num_rows, "batch_size": batch_size, "pad_id": PAD}
        batches = eval_batches(FakeRows(100), **settings)
        return [int(r) for batch in batches for r in batch["row"] if r >= 0]

    assert rows(20, 7) == rows(20, 3) == rows(50, 8)[:20] != sorted(rows(20, 7))


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


class Counting:
    def __init__(self, fail_at=None):
        self.read, self.fail_at = [], fail_at

    def __getitem__(self, k):
        if k == self.fail_at:
            raise OSError(f"batch {k}")
        self.read.append(k)
        return k


@pytest.mark.parametrize("depth", [1, 4, 100])
def test_prefetch_keeps_the_order_and_reads_ahead(depth):
    batches = Counting()
    assert list(prefetch(batches, 3, 20, depth)) == list(range(3, 20))
    assert batches.read == list(range(3, 20)) and not prefetch_threads()
    assert list(prefetch(batches, 5, 5)) == []


def test_prefetch_is_bounded_and_ends_when_closed():
    batches = Counting()
    iterator = prefetch(batches, 0, 10**9, depth=4)
    assert next(iterator) == 0
    deadline = time.monotonic() + 10
    while len(batches.read) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert batches.read == [0, 1, 2, 3, 4]
    iterator.close()
    assert not prefetch_threads()


def test_prefetch_raises_where_reading_failed():
    iterator = prefetch(Counting(fail_at=2), 0, 10)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(OSError, match="batch 2"):
        next(iterator)
    assert not prefetch_threads()


class DamagedRows(FakeRows):
    bad = (3, 11, 12)

    def read(self, ids_N):
        for id_ in ids_N.tolist():
            if id_ in self.bad:
                raise InputError(f"shard-0: record {id_} cannot be read")
        return super().read(ids_N)


def test_r14_damaged_rows_are_padding_and_counted(capsys):
    """The same ones in every run, however it reads; all other rows are as they were."""
    settings = dict(seed=1, pad_id=PAD)
    whole = TrainBatches(FakeRows(40), batch_size=8, **settings)
    some = TrainBatches(DamagedRows(40), batch_size=8, max_bad_rows=3, **settings)
    again = TrainBatches(DamagedRows(40), batch_size=8, max_bad_rows=3, **settings)
    for k in range(12):  # over two epochs, so that each comes twice
        expected, found = whole[k], some[k]
        is_bad_B = np.isin(expected["row"], DamagedRows.bad)
        for name, array in found.items():
            np.testing.assert_array_equal(array[~is_bad_B], expected[name][~is_bad_B])
        assert (found["tokens"][is_bad_B] == PAD).all()
        assert not found["segment"][is_bad_B].any()
        np.testing.assert_array_equal(found["row"], expected["row"])
    for k in reversed(range(12)):
        for name, array in again[k].items():
            np.testing.assert_array_equal(array, some[k][name])
    told = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(told) == 6  # three each, once
    assert "3 of at most 3: shard-0: record" in told[2]


def test_r14_more_damaged_rows_than_allowed_stop():
    batches = TrainBatches(DamagedRows(40), batch_size=8, seed=1, max_bad_rows=2)
    with pytest.raises(InputError, match="data.max_bad_rows = 2: shard-0: record"):
        for k in range(5):
            batches[k]
    with pytest.raises(InputError, match="^shard-0: record"):
        strict = TrainBatches(DamagedRows(40), batch_size=8, seed=1)
        for k in range(5):
            strict[k]


def test_r14_a_batch_of_nothing_but_damage_is_padding():
    batches = TrainBatches(DamagedRows(40), batch_size=1, seed=1, max_bad_rows=3)
    ids = [int(batches[k]["row"][0]) for k in range(40)]
    batch = batches[ids.index(11)]
    assert not batch["segment"].any() and not batch["word_start"].any()
