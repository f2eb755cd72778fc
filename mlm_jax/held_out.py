"""Exact means over a held-out set, under masks that never change."""

import jax
import numpy as np


def evaluate(eval_step, params, batches, key, hparams):
    """Returns the sums over all batches: each row counts once, padding not at all.

    Sums over batches are taken in double precision: the batch size does not show.
    """
    # All batches are in flight before the first result is waited for.
    sums = [eval_step(params, batch, key, hparams) for batch in batches]
    total = jax.tree.map(_exact_sum, *jax.device_get(sums))
    return total | {"mask_hash": total["mask_hash"] % 2**32}


def _exact_sum(*leaves):
    """In 64 bits, whatever the device counted in."""
    is_integer = np.issubdtype(leaves[0].dtype, np.integer)
    dtype = np.int64 if is_integer else np.float64
    return np.sum(leaves, axis=0, dtype=dtype).tolist()


def unigram_entropy(batches, is_special_V):
    """Returns the entropy, in nats, of the ordinary tokens of `batches`: the loss of a
    model that knows how often each token occurs there and nothing else."""
    counts_V = np.zeros(len(is_special_V), np.int64)
    for batch in batches:
        counts_V += np.bincount(batch["tokens"].ravel(), minlength=len(counts_V))
    counts_V[is_special_V] = 0
    p = counts_V[counts_V > 0] / counts_V.sum()
    return float(-(p * np.log(p)).sum())
