"""Several splits of rows as one, in an order that keeps to their weights.

The order is a cycle: in each turn of it every source has exactly its share of the
rows, as evenly spread as can be. So the source of the row at a place, and how many of
that source came before, are functions of the place alone.
"""

import fractions
import math
from collections.abc import Sequence

import numpy as np

from mlm_jax.data.shards import Rows
from mlm_jax.errors import InputError

MAX_CYCLE = 1_000_000


def shares(weights: Sequence[fractions.Fraction]) -> list[int]:
    """Returns the rows of each source in a cycle: the smallest whole numbers that are
    as the weights. Raises InputError if the cycle is longer than `MAX_CYCLE`."""
    whole = math.lcm(*(weight.denominator for weight in weights))
    counts = [int(weight * whole) for weight in weights]
    counts = [count // math.gcd(*counts) for count in counts]
    if sum(counts) > MAX_CYCLE:
        raise InputError(
            f"weights {' + '.join(f'{float(w):g}' for w in weights)} repeat after"
            f" {sum(counts):,} rows only; round them, so that it is {MAX_CYCLE:,} at"
            " most"
        )
    return counts


class Cycle:
    """Which source each place of an endless sequence is of.

    Args:
      shares: the rows of each source in a turn.
    """

    def __init__(self, shares: Sequence[int]):
        self._shares_S = np.array(shares, np.int64)
        # Source s wants its rows in the middle of each 1/shares[s] of a turn; equal
        # fractions are equal as floats too, and keep the order of the sources.
        wanted_Q = np.concatenate([(np.arange(n) + 0.5) / n for n in shares])
        source_Q = np.repeat(np.arange(len(shares)), shares)
        self._source_Q = source_Q[np.argsort(wanted_Q, kind="stable")]
        self._before_Q = np.empty_like(self._source_Q)
        for source, share in enumerate(shares):
            self._before_Q[self._source_Q == source] = np.arange(share)

    def at(self, place_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each place and the rows of that source before it."""
        turn_B, offset_B = np.divmod(place_B, len(self._source_Q))
        source_B = self._source_Q[offset_B]
        return source_B, turn_B * self._shares_S[source_B] + self._before_Q[offset_B]


class MixedRows:
    """The rows of several splits; their ids are counted on from one to the next.

    Args:
      splits: the rows of each source.
      shares: how many of each source are in a turn of the training order.
    """

    def __init__(self, splits: Sequence[Rows], shares: Sequence[int]):
        self.splits, self.cycle = splits, Cycle(shares)
        self.row_length = splits[0].row_length
        self.sizes_S = np.array([len(split) for split in splits])
        self.starts_S = np.cumsum(self.sizes_S) - self.sizes_S

    def __len__(self) -> int:
        return int(self.sizes_S.sum())

    def verify(self) -> None:
        """Reads every record; see `Rows.verify`."""
        for split in self.splits:
            split.verify()

    def read(self, ids_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by id; see `Rows.read`."""
        source_N = np.searchsorted(self.starts_S, ids_N, side="right") - 1
        places, found = [], []
        for source in np.unique(source_N):
            (place_K,) = np.nonzero(source_N == source)
            places.append(place_K)
            ids_K = ids_N[place_K] - self.starts_S[source]
            found.append(self.splits[source].read(ids_K))
        order_N = np.argsort(np.concatenate(places))
        widest = max(part["segment_lengths"].shape[1] for part in found)
        for part in found:
            missing = widest - part["segment_lengths"].shape[1]
            part["segment_lengths"] = np.pad(
                part["segment_lengths"], [(0, 0), (0, missing)]
            )
        return {
            name: np.concatenate([part[name] for part in found])[order_N]
            for name in found[0]
        }
