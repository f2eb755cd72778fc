"""Small models that read texts, for the tests of what a trained encoder is used for."""

import functools

import jax
import numpy as np

from mlm_jax import parallel
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.tasks.reader import Reader
from tests.helpers import random_params, tiny_model

ROW_LENGTH = 32
MATRICES = ("kernel", "embedding")
# "wide" and "hello" are words of one piece, "wideworld" and "hellohello" of several.
TEXT = ["hello wide world, the world is wide and the word is hello"] * 4


@functools.cache
def make_tokenizer(kind="wordpiece", vocab_size=60):
    size = max(vocab_size, {"bpe": 290}.get(kind, 0))
    return Tokenizer.train(
        TEXT, kind=kind, vocab_size=size, lowercase=True, strip_accents=True
    )


def make_reader(kind="wordpiece", *, devices=1, params=None, seed=0, **settings):
    """Returns a `Reader` of a model with random parameters."""
    tokenizer = make_tokenizer(kind)
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        row_length=ROW_LENGTH,
        width=16,
        dropout=0.5,
        attention_dropout=0.5,
    )
    if params is None:
        # With a mean of their own, products would say little of what they meet.
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x - 0.3 if path[-1].key in MATRICES else x,
            random_params(model, ROW_LENGTH, seed),
        )
    mesh = parallel.make_mesh({"data": devices}, jax.devices()[:devices])
    return Reader(model, params, tokenizer, mesh, row_length=ROW_LENGTH, **settings)


def log_p_NxV(reader, tokens_NxT, place):
    """Returns float64[N, V], by hand: log p at one position of each row, logits whole.

    Rows are as long as the texts, so there is no padding.
    """
    tokens_NxT = np.asarray(tokens_NxT, np.int32)
    position_NxT = np.broadcast_to(np.arange(tokens_NxT.shape[1]), tokens_NxT.shape)
    predict_Nx1 = np.full((len(tokens_NxT), 1), place, np.int32)
    rows = tokens_NxT, np.ones_like(tokens_NxT), position_NxT, predict_Nx1
    found = _apply(reader.model)({"params": reader.params}, *rows)
    hidden, table_VxD, bias_V = (np.asarray(x, np.float64) for x in found)
    logits_NxV = hidden[:, 0] @ table_VxD.T + bias_V[None]
    logits_NxV = logits_NxV[:, : reader.tokenizer.vocab_size]
    logits_NxV -= logits_NxV.max(1, keepdims=True)
    return logits_NxV - np.log(np.exp(logits_NxV).sum(1, keepdims=True))


@functools.cache
def _apply(model):
    """One compiled function a model: a bound method is a new one each time."""
    return jax.jit(model.apply)
