"""From a config to the functions it stands for: init, train step, evaluation step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections

from mlm_jax import config, optim, parallel, schedules, state, step
from mlm_jax.corruption import collocations, policy, select, settings
from mlm_jax.model.head import MaskedLM, make_model, require_head


class Program(NamedTuple):
    """The compiled functions of a run.

    `init(key, hparams)` returns the state, placed like `abstract_state`, and
    `place_hparams(hparams)` that part of it. `train_step` and `eval_step` are as
    `parallel` describes them, `step` is the training step of one device, uncompiled.
    """

    model: MaskedLM
    abstract_state: Any
    init: Callable
    place_hparams: Callable
    train_step: Callable
    eval_step: Callable
    step: Callable


def model_of(c, vocab_size, platform="cpu"):
    return make_model(
        vocab_size=vocab_size,
        row_length=c.data.row_length,
        platform=platform,
        **c.model,
    )


def make_program(c, tokenizer, counts_V, mesh, slots=None):
    """Returns the program of config `c` for the devices of `mesh`.

    `tokenizer` gives `vocab_size`, `is_special` bool[V] and `special.mask`; `counts_V`
    is how often each token occurs in the training rows. `slots` are the prediction
    slots of a row, if not just those that `c` needs: programs of equal slots are equal
    where configs differ in `config.TRACED` only.
    """
    platform = mesh.devices.flat[0].platform
    model = model_of(c, tokenizer.vocab_size, platform)
    require_head(model)
    optimizer = optim.OPTIMIZERS[c.optim.name]
    init = functools.partial(
        state.init_state, model=model, optimizer=optimizer, row_length=c.data.row_length
    )
    abstract_state = jax.eval_shape(init, jax.random.key(0), config.hparams(c))
    shardings = parallel.state_shardings(
        abstract_state, parallel.RULES, mesh, parallel.BIAS_RULES
    )
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
            decay_begin=hparams["decay_begin"],
        )
        return hparams["peak_learning_rate"] * scale

    mode = parallel.mode_for(c.parallel.mode, mesh)
    loss_fn = functools.partial(
        step.make_loss_fn,
        model,
        tokenizer.vocab_size,
        is_partitioned="tensor" in mesh.shape,
    )
    train_step = functools.partial(
        step.train_step,
        corrupt=train_corrupt(c, tokenizer, counts_V, slots),
        loss_fn=loss_fn(
            train=True, per_token=c.corruption.token_weights == "running_loss"
        ),
        optimizer=optimizer,
        schedule=schedule,
        num_microbatches=c.parallel.microbatches,
    )
    eval_step = functools.partial(
        step.eval_step,
        corrupt=eval_corrupt(c, tokenizer),
        loss_fn=loss_fn(train=False),
    )
    return Program(
        model=model,
        abstract_state=abstract_state,
        init=jax.jit(init, out_shardings=shardings),
        place_hparams=jax.jit(
            functools.partial(jax.tree.map, jax.numpy.asarray),
            out_shardings=shardings.hparams,
        ),
        train_step=parallel.compile_train_step(train_step, mode, mesh, shardings),
        eval_step=parallel.compile_eval_step(eval_step, mode, mesh, shardings),
        step=train_step,
    )


def train_corrupt(c, tokenizer, counts_V, slots=None):
    found = None
    if c.corruption.strategy == "pmi":
        found = collocations.load(c.corruption.collocations, tokenizer)
    return corrupt_of(c, tokenizer, counts_V, c.corruption, found, slots)


def eval_corrupt(c, tokenizer, rate=None, strategy="token", found=None):
    """Returns `corrupt` of evaluations up to `rate`, by default the highest one in
    training; `found` is as `corrupt_of` has it."""
    section = exam(c, rate or max(c.eval.rates), strategy)
    return corrupt_of(c, tokenizer, None, section, found)


def eval_hparams(c, rate, strategy="token"):
    return settings.hparams(exam(c, rate, strategy))


def exam(c, rate, strategy="token"):
    """Returns the corruption of an evaluation at `rate`: no one's training policy, but
    an exact count of at least one, and ordinary replacements; in training, of single
    tokens. Of the config only the `eval` section enters."""
    fields = settings.EXAM | {
        "strategy": strategy,
        "rate": rate,
        "mask_frac": c.eval.mask_frac,
        "random_frac": c.eval.random_frac,
    }
    return ml_collections.ConfigDict(fields)


def corrupt_of(c, tokenizer, counts_V, corruption, found, slots=None):
    """Returns `policy.make_corrupt` of a corruption section; `found` are the
    collocations of `pmi`, None elsewhere, and `slots` those of a row, if not just what
    the section needs."""
    return policy.make_corrupt(
        strategy=corruption.strategy,
        collocations=found,
        token_weights=corruption.token_weights,
        count=corruption.count,
        num_slots=slots or num_slots(c, corruption),
        views=corruption.views,
        random_pool=corruption.random_pool,
        mask_id=tokenizer.special.mask,
        is_special_V=tokenizer.is_special,
        counts_V=counts_V,
    )


def num_slots(c, corruption):
    """Returns M, the prediction slots of a row."""
    return select.capacity(
        corruption.count,
        settings.highest_rate(corruption),
        c.data.row_length - 2,  # [CLS] and [SEP]
        corruption.min_predictions,
        settings.slack(corruption),
        corruption.views,
    )
