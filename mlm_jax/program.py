"""From a config to the functions it stands for: init, train step, evaluation step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mlm_jax import config, optim, parallel, schedules, state, step
from mlm_jax.corruption import policy, select
from mlm_jax.model.head import MaskedLM, make_model


class Program(NamedTuple):
    """The compiled functions of a run.

    `init(key, hparams)` returns the state, placed like `abstract_state`. `train_step`
    and `eval_step` are as `parallel` describes them.
    """

    model: MaskedLM
    abstract_state: Any
    init: Callable
    train_step: Callable
    eval_step: Callable


def model_of(c, vocab_size):
    return make_model(vocab_size=vocab_size, row_length=c.data.row_length, **c.model)


def make_program(c, tokenizer, mesh):
    """Returns the program of config `c` for the devices of `mesh`.

    `tokenizer` gives `vocab_size`, `is_special` bool[V] and `special.mask`.
    """
    model = model_of(c, tokenizer.vocab_size)
    optimizer = optim.OPTIMIZERS[c.optim.name]
    init = functools.partial(
        state.init_state, model=model, optimizer=optimizer, row_length=c.data.row_length
    )
    abstract_state = jax.eval_shape(init, jax.random.key(0), config.hparams(c))
    shardings = parallel.state_shardings(abstract_state, [], mesh)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        abstract_state,
        shardings,
    )

    def schedule(update, hparams):
        scale = schedules.scale(
            update,
            schedule=c.optim.schedule,
            warmup_steps=hparams["warmup_steps"],
            num_steps=hparams["num_steps"],
        )
        return hparams["peak_learning_rate"] * scale

    train_step = functools.partial(
        step.train_step,
        corrupt=train_corrupt(c, tokenizer),
        loss_fn=step.make_loss_fn(model, tokenizer.vocab_size, train=True),
        optimizer=optimizer,
        schedule=schedule,
        num_microbatches=c.parallel.microbatches,
    )
    eval_step = functools.partial(
        step.eval_step,
        corrupt=eval_corrupt(c, tokenizer),
        loss_fn=step.make_loss_fn(model, tokenizer.vocab_size, train=False),
    )
    mode = c.parallel.mode
    return Program(
        model=model,
        abstract_state=abstract_state,
        init=jax.jit(init, out_shardings=shardings),
        train_step=parallel.compile_train_step(train_step, mode, mesh, shardings),
        eval_step=parallel.compile_eval_step(eval_step, mode, mesh, shardings),
    )


def train_corrupt(c, tokenizer):
    corruption = c.corruption
    return _corrupt(
        c,
        tokenizer,
        count=corruption.count,
        rate=corruption.rate,
        min_predictions=corruption.min_predictions,
        random_pool=corruption.random_pool,
    )


# The exam is no one's training policy: single tokens, an exact count of at least one,
# ordinary replacements. Only the numbers of the config's `eval` section enter.
EVAL_MIN_PREDICTIONS = 1


def eval_corrupt(c, tokenizer):
    return _corrupt(
        c,
        tokenizer,
        count="exact",
        rate=max(c.eval.rates),
        min_predictions=EVAL_MIN_PREDICTIONS,
        random_pool="non_special",
    )


def eval_hparams(c, rate):
    return config.corruption_hparams(
        rate, EVAL_MIN_PREDICTIONS, c.eval.mask_frac, c.eval.random_frac
    )


def _corrupt(c, tokenizer, *, count, rate, min_predictions, random_pool):
    max_maskable = c.data.row_length - 2  # [CLS] and [SEP]
    return policy.make_corrupt(
        count=count,
        num_slots=select.capacity(count, rate, max_maskable, min_predictions),
        random_pool=random_pool,
        mask_id=tokenizer.special.mask,
        is_special_V=tokenizer.is_special,
    )
