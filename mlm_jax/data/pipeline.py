"""Rows to batches. Position is a number: batch k depends on nothing that came before.

A batch is a dict of arrays:

    tokens      int32[B, L]
    segment     int32[B, L]  1, 2, … within a row, 0 at padding
    position    int32[B, L]  restarts at every segment, 0 at padding
    word_start  bool[B, L]
    row         int32[B]     the row's id, -1 for a row of padding
    epoch       int32[B]     of the row's source
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mlm_jax.data.mixture import MixedRows
from mlm_jax.data.shards import Rows
from mlm_jax.errors import InputError

Batch = dict[str, np.ndarray]


def place(k: int, batch_size: int, ramp: Sequence = ()) -> tuple[int, int]:
    """Returns (first row, rows) of batch `k`, where `ramp` has pairs of (steps, rows)
    that come before those of `batch_size` rows."""
    first = 0
    for steps, rows in ramp:
        if k < steps:
            return first + k * rows, rows
        first, k = first + steps * rows, k - steps
    return first + k * batch_size, batch_size


class TrainBatches:
    """Batch `k` is rows `[k·B, (k+1)·B)` of an endless order shuffled anew each epoch,
    or with a ramp those of `place`.

    The order is a function of (seed, epoch, index) alone. A batch may straddle epochs,
    several if there are fewer rows than B; each process reads its own slice of it.

    Of a mixture, the places of the order go to its sources by `mixture.Cycle`; each
    source has an order and epochs of its own.

    Args:
      rows: the split.
      batch_size: B over all processes, a multiple of `num_processes`.
      seed: of the order.
      ramp: pairs of (steps, rows), of smaller batches that come first.
      process_index: which slice is read here.
      num_processes: how many slices there are.
      pad_id: the token of padding.
      max_bad_rows: how many rows of those read here may be damaged on disk. Each is a
        row of padding in its batch, whenever it comes, so that runs stay comparable.
    """

    def __init__(
        self,
        rows: Rows | MixedRows,
        *,
        batch_size: int,
        seed: int,
        ramp: Sequence = (),
        process_index: int = 0,
        num_processes: int = 1,
        pad_id: int = 0,
        max_bad_rows: int = 0,
    ):
        for size in (batch_size, *(rows for _, rows in ramp)):
            if size % num_processes:
                raise ValueError(
                    f"batch_size={size} must be a multiple of"
                    f" {num_processes} processes."
                )
        self._rows = rows if isinstance(rows, MixedRows) else MixedRows([rows], [1])
        self._batch_size, self._ramp = batch_size, ramp
        self._seed = seed
        self._process_index, self._num_processes = process_index, num_processes
        self._pad_id, self._max_bad_rows = pad_id, max_bad_rows
        self._bad: set[int] = set()
        self._orders: dict[int, dict[int, np.ndarray]] = {}

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return len(self._rows)

    def __getitem__(self, k: int) -> Batch:
        first, size = place(k, self._batch_size, self._ramp)
        local_size = size // self._num_processes
        first += self._process_index * local_size
        place_B = np.arange(first, first + local_size)
        source_B, index_B = self._rows.cycle.at(place_B)
        epoch_B = index_B // self._rows.sizes_S[source_B]
        ids_B = index_B % self._rows.sizes_S[source_B]
        for source in np.unique(source_B).tolist():
            is_source_B = source_B == source
            orders = self._orders_of(source, np.unique(epoch_B[is_source_B]).tolist())
            for epoch, order_N in orders.items():
                here_B = is_source_B & (epoch_B == epoch)
                ids_B[here_B] = self._rows.starts_S[source] + order_N[ids_B[here_B]]
        try:
            batch = _read(self._rows, ids_B)
        except InputError:
            if not self._max_bad_rows:
                raise
            batch = self._read_without_bad(ids_B)
        return batch | {"epoch": epoch_B.astype(np.int32)}

    def _read_without_bad(self, ids_B: np.ndarray) -> Batch:
        is_sound_B = np.array([not self._is_bad(int(id_)) for id_ in ids_B])
        shape = len(ids_B), self._rows.row_length
        batch = {
            "tokens": np.full(shape, self._pad_id, np.int32),
            "segment": np.zeros(shape, np.int32),
            "position": np.zeros(shape, np.int32),
            "word_start": np.zeros(shape, bool),
            "row": ids_B.astype(np.int32),
        }
        if is_sound_B.any():
            for name, sound in _read(self._rows, ids_B[is_sound_B]).items():
                batch[name][is_sound_B] = sound
        return batch

    def _is_bad(self, id_: int) -> bool:
        if id_ in self._bad:
            return True
        try:
            self._rows.read(np.array([id_]))
            return False
        except InputError as error:
            if len(self._bad) == self._max_bad_rows:
                raise InputError(
                    f"more damaged rows than data.max_bad_rows = {self._max_bad_rows}: "
                    f"{error}"
                ) from error
            self._bad.add(id_)
            found = f"{len(self._bad)} of at most {self._max_bad_rows}"
            print(f"warning: a row is left out, {found}: {error}", file=sys.stderr)
            return True

    def _orders_of(self, source: int, epochs: list[int]) -> dict[int, np.ndarray]:
        """Returns the order of each epoch, and keeps no others: they are long."""
        known = self._orders.get(source, {})
        size = int(self._rows.sizes_S[source])
        self._orders[source] = {
            epoch: known[epoch]
            if epoch in known
            else permutation(size, self._seed, epoch, source)
            for epoch in epochs
        }
        return self._orders[source]


class EvalBatches:
    """A fixed choice of rows, each once; see `eval_batches`."""

    def __init__(
        self, rows: Rows | MixedRows, ids_N: np.ndarray, batch_size: int, pad_id: int
    ):
        self._rows, self._ids_N = rows, ids_N
        self._batch_size, self._pad_id = batch_size, pad_id

    def __len__(self) -> int:
        return -(-len(self._ids_N) // self._batch_size)

    def __getitem__(self, k: int) -> Batch:
        if not 0 <= k < len(self):  # also what ends iteration
            raise IndexError(k)
        first = k * self._batch_size
        batch = _read(self._rows, self._ids_N[first : first + self._batch_size])
        batch["epoch"] = np.zeros_like(batch["row"])
        missing = self._batch_size - len(batch["row"])
        filler = {"tokens": self._pad_id, "row": -1}
        return {
            name: np.pad(
                array,
                [(0, missing)] + [(0, 0)] * (array.ndim - 1),
                constant_values=filler.get(name, 0),
            )
            for name, array in batch.items()
        }


def eval_batches(
    rows: Rows, *, num_rows: int, batch_size: int, pad_id: int, seed: int = 0
) -> EvalBatches:
    """Returns batches over the first `num_rows` rows of a fixed random order.

    Every row comes exactly once; the last batch is filled up with rows of padding.

    Args:
      rows: the split.
      num_rows: how many; 0, or more than there are, for all.
      batch_size: B.
      pad_id: the token of padding.
      seed: of the order.
    """
    order = permutation(len(rows), seed, 0)
    return EvalBatches(rows, order[: num_rows or None], batch_size, pad_id)


def prefetch(batches, start: int, stop: int, depth: int = 4) -> Iterator[Batch]:
    """Yields batches `[start, stop)`, read ahead by one thread.

    An error while reading is raised here, at its batch. Closing the iterator, or
    dropping it, ends the thread.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as thread:
        ahead: deque[Future] = deque()
        try:
            for k in range(start, stop):
                ahead.append(thread.submit(batches.__getitem__, k))
                if len(ahead) > depth:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def permutation(num_rows: int, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    key, counter = np.array([seed, epoch], np.uint64), [0, 0, 0, source]
    bits = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
    return np.random.Generator(bits).permutation(num_rows)


def _read(rows: Rows | MixedRows, ids_B: np.ndarray) -> Batch:
    found = rows.read(ids_B)
    segment_BxL, position_BxL = _segments(found["segment_lengths"], rows.row_length)
    return {
        "tokens": found["tokens"],
        "segment": segment_BxL,
        "position": position_BxL,
        "word_start": found["word_start"],
        "row": ids_B.astype(np.int32),
    }


def _segments(lengths_BxS: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns segment numbers and positions, int32[B, L], of `lengths_BxS`."""
    ends_BxS = np.cumsum(lengths_BxS, axis=1)
    starts_BxS = ends_BxS - lengths_BxS
    is_start_BxL = np.zeros((len(lengths_BxS), length), bool)
    row, s = np.nonzero(lengths_BxS)
    is_start_BxL[row, starts_BxS[row, s]] = True
    place_L = np.arange(length)
    is_real_BxL = place_L[None] < ends_BxS[:, -1:]
    start_BxL = np.maximum.accumulate(np.where(is_start_BxL, place_L[None], 0), axis=1)
    segment_BxL = np.cumsum(is_start_BxL, axis=1) * is_real_BxL
    position_BxL = (place_L[None] - start_BxL) * is_real_BxL
    return segment_BxL.astype(np.int32), position_BxL.astype(np.int32)
