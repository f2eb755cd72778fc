"""What a model makes of single texts: many at a time, one program a length.

A text is a row of one segment. Rows are padded to one of a few lengths, and meet the
model with others of that length, `batch_tokens` tokens at a time. Neither padding nor
company changes what is said of a row, but for the last digits of float32.
"""

import enum
import functools
from collections import deque
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlm_jax import parallel
from mlm_jax.errors import InputError
from mlm_jax.model.pooling import POOLINGS
from mlm_jax.step import make_predict_fn

BATCH_TOKENS = 8192
AHEAD = 4  # batches on their way, so that the device need not wait for the next one
SLOTS = 64  # whose logits are made at a time, to find the best of them


class Pieces(enum.IntEnum):
    """Which pieces are looked for."""

    ANY = 0
    FIRST = 1  # those that a word starts with
    LATER = 2  # those that a word goes on with


class Rows(NamedTuple):
    """N texts with [CLS] and [SEP], each with one position to predict."""

    tokens: list[np.ndarray]  # N times int32[T]
    predict: np.ndarray  # int32[N]
    targets: np.ndarray  # int32[N]: tokens for `log_p`, `Pieces` for `best`


class Reader:
    """A model with its parameters and tokenizer, on the devices of `mesh`.

    Args:
      params: may be replaced, by those of another step.
      row_length: the longest text, in tokens with [CLS] and [SEP].
      batch_tokens: about how many tokens the devices get at a time, padding included.
      place: makes of a batch that this process has whole what `mesh` can take.
    """

    def __init__(
        self,
        model,
        params,
        tokenizer,
        mesh,
        *,
        row_length,
        batch_tokens=BATCH_TOKENS,
        place=lambda batch: batch,
    ):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.mesh, self.row_length, self.batch_tokens = mesh, row_length, batch_tokens
        self._place = place
        self._losses = functools.cache(self._make_losses)
        self._best = functools.cache(self._make_best)
        self._vectors = functools.cache(self._make_vectors)

    def frame(self, tokens_T, what="the text"):
        """Returns the tokens between [CLS] and [SEP]. Raises InputError, with both
        numbers, if those are more than the model reads."""
        special = self.tokenizer.special
        if len(tokens_T) + 2 > self.row_length:
            raise InputError(
                f"{what} has {len(tokens_T) + 2} tokens with [CLS] and [SEP]; this "
                f"model reads at most {self.row_length}."
            )
        return np.concatenate([[special.cls], tokens_T, [special.sep]]).astype(np.int32)

    def encode(self, texts):
        """Returns the `Encoded` of each text, without [CLS] and [SEP]. Raises
        InputError for the first that is too long."""
        encoded = self.tokenizer.encode(list(texts))
        for number, (text, found) in enumerate(zip(texts, encoded, strict=True), 1):
            self.frame(found.tokens, f"text {number}, {text[:40]!r},")
        return encoded

    def log_p(self, rows, tick=None):
        """Returns float64[N]: log p of each row's target, in nats.

        `tick(n)` is told of every n rows more that are done.
        """
        (losses_N,) = self.by_row(self._losses(), rows._asdict(), tick)
        return -losses_N.astype(np.float64)

    def best(self, rows, k):
        """Returns (ids int32[N, k], log p float32[N, k]), best first, of the pieces
        that `rows.targets` look for; -inf where there are fewer than k."""
        return self.by_row(self._best(k), rows._asdict())

    def vectors(self, tokens, pooling, tick=None):
        """Returns float32[N, D], the last hidden states of each row pooled into one."""
        (vectors_NxD,) = self.by_row(self._vectors(pooling), {"tokens": tokens}, tick)
        return vectors_NxD

    def by_row(self, function, rows, tick=None):
        """Returns the results of the compiled `function(params, batch)`, a tuple of
        arrays, in the order of rows.

        `rows` are {"tokens": list of int32[T], other names: arrays [N, …]}; the batch
        has them and `segment` and `position`.
        """
        length_N = np.array([bucket(len(t), self.row_length) for t in rows["tokens"]])
        found = None
        for index_B, results in fetched(self._results(function, rows, length_N)):
            results = [x[: len(index_B)] for x in results]
            if found is None:
                num_rows = len(length_N)
                found = [np.zeros((num_rows, *x.shape[1:]), x.dtype) for x in results]
            for all_N, some_B in zip(found, results, strict=True):
                all_N[index_B] = some_B
            if tick is not None:
                tick(len(index_B))
        return found

    def _results(self, function, rows, length_N):
        """Yields (which rows, their results) of each batch."""
        for length in np.unique(length_N).tolist():
            index_N = np.flatnonzero(length_N == length)
            size = self._rows_at_a_time(length, len(index_N))
            for first in range(0, len(index_N), size):
                index_B = index_N[first : first + size]
                batch = self._place(self._batch(rows, index_B, length, size))
                yield index_B, function(self.params, batch)

    def _rows_at_a_time(self, length, num_rows):
        """So many that few are padding, and few sizes, since each is a program."""
        most = max(1, self.batch_tokens // length)
        size = 1
        while size < min(num_rows, most):
            size *= 4
        shards = parallel.num_row_shards(self.mesh)
        return -(-min(size, most) // shards) * shards

    def _batch(self, rows, index_B, length, size):
        """Returns `size` rows of `length` tokens; those past `index_B` are padding."""
        tokens_BxL = np.full((size, length), self.tokenizer.special.pad, np.int32)
        segment_BxL = np.zeros((size, length), np.int32)
        for i, n in enumerate(index_B):
            tokens_T = rows["tokens"][n]
            tokens_BxL[i, : len(tokens_T)] = tokens_T
            segment_BxL[i, : len(tokens_T)] = 1
        position_BxL = np.arange(length, dtype=np.int32)[None] * segment_BxL
        others = {
            name: np.pad(
                np.asarray(x_N)[index_B],
                [(0, size - len(index_B))] + [(0, 0)] * (np.ndim(x_N) - 1),
            )
            for name, x_N in rows.items()
            if name != "tokens"
        }
        whole = {"inputs": tokens_BxL, "segment": segment_BxL, "position": position_BxL}
        return others | whole

    def _make_losses(self):
        predict = make_predict_fn(
            self.model,
            self.tokenizer.vocab_size,
            is_partitioned="tensor" in self.mesh.shape,
        )

        def losses(params, batch):
            slots = {
                "predict": batch["predict"][:, None],
                "targets": batch["targets"][:, None],
                "weights": (batch["segment"][:, :1] > 0).astype(jnp.float32),
            }
            return (predict(params, batch | slots).losses_N[:, 0],)

        return parallel.compile_by_row(losses, self.mesh)

    def _make_best(self, k):
        num_classes = self.tokenizer.vocab_size
        continues_V = self.tokenizer.continues_word
        is_special_V = self.tokenizer.is_special
        allowed_KxV = np.zeros((len(Pieces), num_classes), bool)
        allowed_KxV[Pieces.ANY] = True
        allowed_KxV[Pieces.FIRST] = ~continues_V & ~is_special_V
        allowed_KxV[Pieces.LATER] = continues_V

        def best(params, batch):
            hidden_Bx1xD, table_VxD, bias_V = self.model.apply(
                {"params": params},
                batch["inputs"],
                batch["segment"],
                batch["position"],
                batch["predict"][:, None],
            )
            table_VxD = table_VxD[:num_classes].astype(hidden_Bx1xD.dtype)

            def of_one(slot):
                hidden_D, kind = slot
                logits_V = jnp.dot(
                    table_VxD, hidden_D, preferred_element_type=jnp.float32
                )
                log_p_V = jax.nn.log_softmax(logits_V + bias_V[:num_classes])
                allowed_V = jnp.asarray(allowed_KxV)[kind]
                return jax.lax.top_k(jnp.where(allowed_V, log_p_V, -jnp.inf), k)

            slots = hidden_Bx1xD[:, 0], batch["targets"]
            log_p_BxK, ids_BxK = jax.lax.map(of_one, slots, batch_size=SLOTS)
            return ids_BxK, log_p_BxK

        return parallel.compile_by_row(best, self.mesh)

    def _make_vectors(self, pooling):
        def vectors(params, batch):
            x_BxLxD = self.model.apply(
                {"params": params},
                batch["inputs"],
                batch["segment"],
                batch["position"],
                method=lambda model, *row: model.encoder(*row),
            )
            return (POOLINGS[pooling](x_BxLxD, batch["segment"]),)

        return parallel.compile_by_row(vectors, self.mesh)


def fetched(results):
    """Yields results as arrays on the host, while the device makes the next ones."""
    pending: deque = deque()
    for result in results:
        pending.append(result)
        if len(pending) > AHEAD:
            yield jax.device_get(pending.popleft())
    while pending:
        yield jax.device_get(pending.popleft())


def bucket(length, longest):
    """Returns the padded length: 8, 12, 16, 24, 32, 48, 64, 96, …, at most `longest`.
    A third of a row is padding at most, where powers of two would make it a half."""
    power = 8
    while power < length:
        power *= 2
    three_quarters = power * 3 // 4
    return min(three_quarters if 8 < length <= three_quarters else power, longest)
