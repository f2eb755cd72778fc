"""What each field of a config may be, and what older versions had instead of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mlm_jax.corruption import settings


class Rule(NamedTuple):
    allowed: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()  # all that is allowed, where that is a choice


def one_of(*names):
    words = tuple(map(str, names))
    return Rule(f"one of {', '.join(words)}", lambda value: value in names, words)


def at_least(low):
    return Rule(f"{low} or more", lambda value: low <= value < float("inf"))


POSITIVE = Rule("a number above 0", lambda value: 0 < value < float("inf"))
NON_NEGATIVE = Rule("a number of 0 or more", lambda value: 0 <= value < float("inf"))
OPTIONAL_POSITIVE = Rule(
    "None, or a number above 0", lambda value: value is None or POSITIVE.holds(value)
)
INNER_FRACTION = Rule("above 0 and below 1", lambda value: 0 < value < 1)
FRACTION = Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)
RATE = Rule("a number above 0 and up to 1", lambda value: 0 < value <= 1)
OPTIONAL_RATE = Rule(
    "None, or a number above 0 and up to 1",
    lambda value: value is None or RATE.holds(value),
)
OPTIONAL_COUNT = Rule(
    "None, or an integer of 1 or more", lambda value: value is None or value >= 1
)
ROW_RATE = Rule(
    "() or two numbers (low, high), above 0 and up to 1",
    lambda pair: len(pair) == 0 or (len(pair) == 2 and 0 < pair[0] <= pair[1] <= 1),
)
WORDS = Rule(
    f"an integer from 1 to {settings.MAX_WORDS}",
    lambda value: 1 <= value <= settings.MAX_WORDS,
)
DROPOUT = Rule("a number from 0 to 0.99", lambda value: 0 <= value <= 0.99)
BELOW_ONE = Rule("a number from 0 to below 1", lambda value: 0 <= value < 1)
BOOLEAN = Rule("true or false", lambda value: value in (True, False))
OPTIONAL_BOOLEAN = Rule(
    "None, true or false", lambda value: value in (None, True, False)
)
ROW_LENGTH = Rule("from 8 to 65535", lambda value: 8 <= value < 2**16)
DEVICES = Rule(
    "a number of devices, or -1 for all", lambda value: value == -1 or value >= 1
)
SEED = Rule("an integer from 0 to 4294967295", lambda value: 0 <= value < 2**32)
RATES = Rule(
    "a tuple of different numbers above 0 and up to 1, such as (0.15, 0.4)",
    lambda rates: (
        len(rates) > 0 and len(set(rates)) == len(rates) and all(map(RATE.holds, rates))
    ),
)
SENTENCES = Rule(
    "a tuple of sentences, each with [MASK]",
    lambda sentences: all("[MASK]" in sentence for sentence in sentences),
)

RAMP = Rule(
    "() or pairs of (steps, rows) of 1 or more, such as ((1000, 64), (1000, 128))",
    lambda ramp: all(steps >= 1 and rows >= 1 for steps, rows in ramp),
)

RULES = {
    "seed": SEED,
    "data.document": one_of("file", "blank_line", "line"),
    "data.on_bad_text": one_of("stop", "skip", "replace"),
    "data.validation_fraction": INNER_FRACTION,
    "data.row_length": ROW_LENGTH,
    "data.packing": one_of("packed", "full", "single"),
    "data.batch_size": at_least(1),
    "data.batch_ramp": RAMP,
    "data.max_bad_rows": at_least(0),
    "tokenizer.kind": one_of("wordpiece", "bpe", "unigram"),
    "tokenizer.vocab_size": at_least(16),
    "tokenizer.max_characters": at_least(1),
    "corruption.strategy": one_of("token", "word", "span", "ngram", "pmi"),
    "corruption.span_lengths": one_of(*settings.LENGTHS),
    "corruption.span_p": INNER_FRACTION,
    "corruption.span_min": WORDS,
    "corruption.span_max": WORDS,
    "corruption.ngram_max": WORDS,
    "corruption.rate": RATE,
    "corruption.final_rate": OPTIONAL_RATE,
    "corruption.schedule": one_of(*settings.SCHEDULES),
    "corruption.schedule_begin": FRACTION,
    "corruption.schedule_end": FRACTION,
    "corruption.row_rate": ROW_RATE,
    "corruption.weighting": one_of("equal", "inverse_rate"),
    "corruption.corruption_rate": OPTIONAL_RATE,
    "corruption.prediction_rate": OPTIONAL_RATE,
    "corruption.views": at_least(1),
    "corruption.mask_frac": FRACTION,
    "corruption.random_frac": FRACTION,
    "corruption.count": one_of("exact", "stochastic", "bernoulli"),
    "corruption.min_predictions": at_least(0),
    "corruption.token_weights": one_of("uniform", "inverse_frequency", "running_loss"),
    "corruption.weight_power": NON_NEGATIVE,
    "corruption.token_loss_decay": BELOW_ONE,
    "corruption.random_pool": one_of("non_special", "full_vocab", "unigram"),
    "corruption.replacement_unit": one_of("token", "unit"),
    "corruption.dynamic": BOOLEAN,
    "corruption.duplicates": at_least(1),
    "model.num_layers": at_least(1),
    "model.width": at_least(1),
    "model.num_heads": at_least(1),
    "model.mlp_width": at_least(1),
    "model.activation": one_of("gelu", "gelu_tanh", "silu", "relu"),
    "model.gated": BOOLEAN,
    "model.bias": BOOLEAN,
    "model.norm": one_of("layer_norm", "rms_norm"),
    "model.norm_position": one_of("post", "pre"),
    "model.norm_epsilon": POSITIVE,
    "model.norm_bias": BOOLEAN,
    "model.embed_norm": OPTIONAL_BOOLEAN,
    "model.token_types": at_least(0),
    "model.position": one_of("learned", "rotary"),
    "model.max_length": OPTIONAL_COUNT,
    "model.rotary_base": POSITIVE,
    "model.global_every": at_least(1),
    "model.window": at_least(1),
    "model.local_rotary_base": POSITIVE,
    "model.head": BOOLEAN,
    "model.tied": BOOLEAN,
    "model.decoder_bias": BOOLEAN,
    "model.dropout": DROPOUT,
    "model.attention_dropout": DROPOUT,
    "model.scan_unroll": OPTIONAL_COUNT,
    "model.remat": one_of("none", "dots", "full"),
    "model.dtype": one_of("float32", "bfloat16"),
    "optim.name": one_of(
        *("adamw", "stable_adamw", "lamb", "lion", "adafactor", "muon", "sgd")
    ),
    "optim.num_steps": at_least(1),
    "optim.peak_learning_rate": POSITIVE,
    "optim.warmup_steps": at_least(0),
    "optim.decay_begin": at_least(0),
    "optim.schedule": one_of(
        *("constant", "linear", "cosine", "one_minus_sqrt", "inverse_sqrt")
    ),
    "optim.weight_decay": NON_NEGATIVE,
    "optim.clip_norm": POSITIVE,
    "optim.label_smoothing": BELOW_ONE,
    "optim.z_loss": NON_NEGATIVE,
    "optim.b1": BELOW_ONE,
    "optim.b2": BELOW_ONE,
    "optim.eps": POSITIVE,
    "optim.on_nonfinite": one_of("stop", "skip"),
    "optim.max_skips": at_least(1),
    "optim.spike_sigmas": OPTIONAL_POSITIVE,
    "parallel.mode": one_of("pmap", "shard_map", "jit"),
    "parallel.mesh.data": DEVICES,
    "parallel.mesh.fsdp": at_least(1),
    # The vocabulary is padded to a multiple of 128, and divided.
    "parallel.mesh.tensor": one_of(1, 2, 4, 8, 16, 32, 64, 128),
    "parallel.microbatches": at_least(1),
    "eval.rates": RATES,
    "eval.mask_frac": FRACTION,
    "eval.random_frac": FRACTION,
    "eval.seed": SEED,
    "eval.num_rows": at_least(0),
    "eval.batch_size": at_least(1),
    "eval.every_steps": at_least(1),
    "eval.fill_mask": SENTENCES,
    "checkpoint.every_steps": at_least(1),
    "checkpoint.keep": at_least(1),
    "checkpoint.keep_every": at_least(0),
    "checkpoint.keep_best": BOOLEAN,
    "log.every_steps": at_least(1),
}

# Fields that runs of an older version have not saved, with what that version did.
SINCE: dict[str, Any] = {
    "data.max_bad_rows": 0,
    "optim.spike_sigmas": None,
    "eval.minimal_pairs": None,
    "init_from": None,
    "model.activation": "gelu",
    "model.gated": False,
    "model.bias": True,
    "model.norm": "layer_norm",
    "model.norm_epsilon": 1e-12,
    "model.norm_bias": True,
    "model.embed_norm": None,
    "model.token_types": 0,
    "model.max_length": None,
    "model.rotary_base": 10_000.0,
    "model.global_every": 1,
    "model.window": 64,
    "model.local_rotary_base": 10_000.0,
    "model.head": True,
    "model.tied": True,
    "model.decoder_bias": True,
}
