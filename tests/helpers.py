"""Small rows, models and steps that several test files share."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from mlm_jax import optim, schedules, step
from mlm_jax.corruption import policy, settings
from mlm_jax.model.head import make_model
from mlm_jax.state import TrainState

PAD, UNK, CLS, SEP, MASK = range(5)
NUM_SPECIAL = 5


def is_special(vocab_size, special_ids=range(NUM_SPECIAL)):
    """Returns bool[V]."""
    return np.isin(np.arange(vocab_size), list(special_ids))


def make_batch(tokens_BxL, segment_BxL=None, *, word_start=True, epoch=0, row=None):
    """Returns a batch; by default each row is one segment that ends where [PAD] starts,
    each token is a word, and the rows are rows 0, 1, … of the split."""
    tokens_BxL = np.asarray(tokens_BxL, np.int32)
    if segment_BxL is None:
        segment_BxL = tokens_BxL != PAD
    segment_BxL = np.asarray(segment_BxL, np.int32)
    row_B = np.arange(len(tokens_BxL)) if row is None else np.asarray(row)
    return {
        "tokens": tokens_BxL,
        "segment": segment_BxL,
        "position": positions(segment_BxL),
        "word_start": np.broadcast_to(word_start, tokens_BxL.shape),
        "row": row_B.astype(np.int32),
        "epoch": np.broadcast_to(np.int32(epoch), row_B.shape),
    }


def positions(segment_BxL):
    """Returns int32[B, L]: 0, 1, … anew in every segment, 0 at padding."""
    position_BxL = np.zeros_like(segment_BxL)
    for i in range(1, segment_BxL.shape[1]):
        same_B = segment_BxL[:, i] == segment_BxL[:, i - 1]
        position_BxL[:, i] = np.where(same_B, position_BxL[:, i - 1] + 1, 0)
    return position_BxL * (segment_BxL > 0)


def tiny_model(**changes):
    """A model of two layers of width 8; rows of 16 tokens of 12 (V is 128)."""
    settings = base.get_config().model.to_dict() | dict(
        vocab_size=12,
        row_length=16,
        num_layers=2,
        width=8,
        num_heads=2,
        mlp_width=16,
        dropout=0.0,
        attention_dropout=0.0,
        scan_unroll=1,
    )
    return make_model(**settings | changes)


def random_params(model, row_length=16, seed=0):
    """Returns parameters that are all different: zero biases and unit scales, as at
    initialisation, would hide an error in either."""
    row = jnp.zeros((1, row_length), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, row, row)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.3, 0.5, leaf.shape), leaf.dtype),
        shapes["params"],
    )


def corruption(**changes):
    """Returns the corruption section of a config: the defaults and `changes`."""
    section = base.get_config().corruption
    section.update(changes)
    return section


def hparams(**changes):
    """Every number that a step traces, weight decay and clipping off."""
    numbers = settings.hparams(corruption(rate=0.4)) | dict(
        peak_learning_rate=0.1,
        warmup_steps=0.0,
        num_steps=100.0,
        weight_decay=0.0,
        clip_norm=1e9,
        label_smoothing=0.0,
        z_loss=0.0,
        b1=0.9,
        b2=0.99,
        eps=1e-6,
    )
    return jax.tree.map(jnp.asarray, numbers | changes)


def make_state(params, optimizer, hparams, seed=0):
    """Returns the state before the first update."""
    opt_state = optim.OPTIMIZERS[optimizer](hparams["peak_learning_rate"], hparams)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=opt_state.init(params),
        token_loss=jnp.float32(0),  # of no token: these steps do not ask for it
        recent={},
        key=jax.random.key(seed),
        hparams=hparams,
    )


def compile_train_step(*, corrupt, loss_fn, optimizer, schedule="linear", **settings):
    """Returns the jitted `train_step(state, batch)`."""

    def rate(update, hparams):
        return hparams["peak_learning_rate"] * schedules.scale(
            update,
            schedule=schedule,
            warmup_steps=hparams["warmup_steps"],
            num_steps=hparams["num_steps"],
            decay_begin=0,
        )

    return jax.jit(
        functools.partial(
            step.train_step,
            corrupt=corrupt,
            loss_fn=loss_fn,
            optimizer=optim.OPTIMIZERS[optimizer],
            schedule=rate,
            **settings,
        )
    )


def make_corrupt(vocab_size=12, **changes):
    """Returns `corrupt(key, batch, hparams, progress)` for a vocabulary with specials
    first; by default any number of predictions fits into rows of 16 tokens."""
    fields = dict(
        strategy="token",
        collocations=None,
        token_weights="uniform",
        count="exact",
        num_slots=16,
        views=1,
        random_pool="non_special",
        mask_id=MASK,
        is_special_V=is_special(vocab_size),
        counts_V=np.arange(vocab_size),
    )
    return policy.make_corrupt(**fields | changes)


def largest_shape(compiled):
    """Returns the shape of the largest array that a compiled program names."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(
        (tuple(map(int, shape.split(","))) for shape in shapes),
        key=lambda shape: (np.prod(shape), shape),
    )
