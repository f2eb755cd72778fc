"""What a config must satisfy, the numbers a step traces, and how it is saved.

Imports no jax, so that a wrong value is refused at once.
"""

import difflib
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from mlm_jax.corruption import settings
from mlm_jax.errors import InputError
from mlm_jax.files import write_text


class Rule(NamedTuple):
    allowed: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()  # all that is allowed, where that is a choice


def _one_of(*names):
    words = tuple(map(str, names))
    return Rule(f"one of {', '.join(words)}", lambda value: value in names, words)


def _at_least(low):
    return Rule(f"{low} or more", lambda value: low <= value < float("inf"))


POSITIVE = Rule("a number above 0", lambda value: 0 < value < float("inf"))
NON_NEGATIVE = Rule("a number of 0 or more", lambda value: 0 <= value < float("inf"))
FRACTION = Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)
RATE = Rule("a number above 0 and up to 1", lambda value: 0 < value <= 1)
OPTIONAL_RATE = Rule(
    "None, or a number above 0 and up to 1",
    lambda value: value is None or RATE.holds(value),
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
    "data.document": _one_of("file", "blank_line", "line"),
    "data.on_bad_text": _one_of("stop", "skip", "replace"),
    "data.validation_fraction": Rule(
        "above 0 and below 1", lambda value: 0 < value < 1
    ),
    "data.row_length": Rule("from 8 to 65535", lambda value: 8 <= value < 2**16),
    "data.packing": _one_of("packed", "full", "single"),
    "data.batch_size": _at_least(1),
    "data.batch_ramp": RAMP,
    "data.max_bad_rows": _at_least(0),
    "tokenizer.kind": _one_of("wordpiece", "bpe", "unigram"),
    "tokenizer.vocab_size": _at_least(16),
    "tokenizer.max_characters": _at_least(1),
    "corruption.strategy": _one_of("token", "word", "span", "ngram", "pmi"),
    "corruption.span_lengths": _one_of(*settings.LENGTHS),
    "corruption.span_p": Rule("above 0 and below 1", lambda value: 0 < value < 1),
    "corruption.span_min": WORDS,
    "corruption.span_max": WORDS,
    "corruption.ngram_max": WORDS,
    "corruption.rate": RATE,
    "corruption.final_rate": OPTIONAL_RATE,
    "corruption.schedule": _one_of(*settings.SCHEDULES),
    "corruption.schedule_begin": FRACTION,
    "corruption.schedule_end": FRACTION,
    "corruption.row_rate": ROW_RATE,
    "corruption.weighting": _one_of("equal", "inverse_rate"),
    "corruption.corruption_rate": OPTIONAL_RATE,
    "corruption.prediction_rate": OPTIONAL_RATE,
    "corruption.views": _at_least(1),
    "corruption.mask_frac": FRACTION,
    "corruption.random_frac": FRACTION,
    "corruption.count": _one_of("exact", "stochastic", "bernoulli"),
    "corruption.min_predictions": _at_least(0),
    "corruption.token_weights": _one_of("uniform", "inverse_frequency", "running_loss"),
    "corruption.weight_power": NON_NEGATIVE,
    "corruption.token_loss_decay": BELOW_ONE,
    "corruption.random_pool": _one_of("non_special", "full_vocab", "unigram"),
    "corruption.replacement_unit": _one_of("token", "unit"),
    "corruption.dynamic": BOOLEAN,
    "corruption.duplicates": _at_least(1),
    "model.num_layers": _at_least(1),
    "model.width": _at_least(1),
    "model.num_heads": _at_least(1),
    "model.mlp_width": _at_least(1),
    "model.norm_position": _one_of("post", "pre"),
    "model.position": _one_of("learned", "rotary"),
    "model.dropout": DROPOUT,
    "model.attention_dropout": DROPOUT,
    "model.scan_unroll": Rule(
        "None, or an integer of 1 or more", lambda value: value is None or value >= 1
    ),
    "model.remat": _one_of("none", "dots", "full"),
    "model.dtype": _one_of("float32", "bfloat16"),
    "optim.name": _one_of(
        *("adamw", "stable_adamw", "lamb", "lion", "adafactor", "muon", "sgd")
    ),
    "optim.num_steps": _at_least(1),
    "optim.peak_learning_rate": POSITIVE,
    "optim.warmup_steps": _at_least(0),
    "optim.decay_begin": _at_least(0),
    "optim.schedule": _one_of(
        *("constant", "linear", "cosine", "one_minus_sqrt", "inverse_sqrt")
    ),
    "optim.weight_decay": NON_NEGATIVE,
    "optim.clip_norm": POSITIVE,
    "optim.label_smoothing": BELOW_ONE,
    "optim.z_loss": NON_NEGATIVE,
    "optim.b1": BELOW_ONE,
    "optim.b2": BELOW_ONE,
    "optim.eps": POSITIVE,
    "optim.on_nonfinite": _one_of("stop", "skip"),
    "optim.max_skips": _at_least(1),
    "optim.spike_sigmas": Rule(
        "None, or a number above 0",
        lambda value: value is None or POSITIVE.holds(value),
    ),
    "parallel.mode": _one_of("pmap", "shard_map", "jit"),
    "parallel.mesh.data": Rule(
        "a number of devices, or -1 for all", lambda value: value == -1 or value >= 1
    ),
    "parallel.mesh.fsdp": _at_least(1),
    # The vocabulary is padded to a multiple of 128, and divided.
    "parallel.mesh.tensor": _one_of(1, 2, 4, 8, 16, 32, 64, 128),
    "parallel.microbatches": _at_least(1),
    "eval.rates": RATES,
    "eval.mask_frac": FRACTION,
    "eval.random_frac": FRACTION,
    "eval.seed": SEED,
    "eval.num_rows": _at_least(0),
    "eval.batch_size": _at_least(1),
    "eval.every_steps": _at_least(1),
    "eval.fill_mask": SENTENCES,
    "checkpoint.every_steps": _at_least(1),
    "checkpoint.keep": _at_least(1),
    "checkpoint.keep_every": _at_least(0),
    "checkpoint.keep_best": BOOLEAN,
    "log.every_steps": _at_least(1),
}

# Fields that runs of an older version have not saved, with what that version did.
SINCE: dict[str, Any] = {"eval.minimal_pairs": None}

# What may change when a run is resumed: where, how often, and what else has made no
# number of the run so far.
FREE_ON_RESUME = (
    *("checkpoint.", "log.", "parallel.", "data.cache_dir", "data.data_dir"),
    *("optim.on_nonfinite", "optim.max_skips", "data.max_bad_rows"),
)


def check(c):
    """Raises InputError, naming the field, at the first value that cannot be used."""
    check_rules(c, RULES)
    for section in ("corruption", "eval"):
        total = c[section].mask_frac + c[section].random_frac
        if total > 1 + 1e-9:
            raise InputError(
                f"config.{section}.mask_frac + config.{section}.random_frac = "
                f"{total:g}; together they may be at most 1 (the rest is kept)."
            )
    settings.check(c.corruption)
    for name in ("warmup_steps", "decay_begin"):
        if c.optim[name] > c.optim.num_steps:
            raise InputError(
                f"config.optim.{name} = {c.optim[name]}; expected at most "
                f"config.optim.num_steps = {c.optim.num_steps}."
            )
    heads = c.model.num_heads
    _check_multiple("model.width", c.model.width, "model.num_heads", heads)
    if c.model.position == "rotary":  # turns pairs of a head's units
        _check_multiple("model.width", c.model.width, "2 x model.num_heads", 2 * heads)
    _check_mesh(c)


def _check_mesh(c):
    for axis in ("fsdp", "tensor"):
        size = c.parallel.mesh[axis]
        if size > 1 and c.parallel.mode != "jit":
            raise InputError(
                f"config.parallel.mesh.{axis} = {size} needs config.parallel.mode = "
                f"jit; {c.parallel.mode} has every parameter on every device."
            )
        for name in {"fsdp": ("width",), "tensor": ("num_heads", "mlp_width")}[axis]:
            _check_multiple(
                f"model.{name}", c.model[name], f"parallel.mesh.{axis}", size
            )


def check_devices(c, num_devices):
    """Returns the mesh, {axis: devices}; raises InputError where it does not fit into
    `num_devices`, or rows do not divide."""
    mesh = c.parallel.mesh.to_dict()
    per_row = mesh["fsdp"] * mesh["tensor"]
    if mesh["data"] == -1 and num_devices % per_row == 0:
        mesh["data"] = num_devices // per_row
    wanted = mesh["data"] * per_row
    if not 0 < wanted <= num_devices:
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
        raise InputError(
            f"config.parallel.mesh is {sizes}; this process has {num_devices} "
            "device(s)."
        )
    parts = mesh["data"] * mesh["fsdp"] * c.parallel.microbatches
    _check_multiple(
        "data.batch_size", c.data.batch_size, "devices x microbatches", parts
    )
    for _, rows in c.data.batch_ramp:
        _check_multiple("data.batch_ramp", rows, "devices x microbatches", parts)
    return mesh


def check_rules(c, rules):
    """Raises InputError at the first field that is missing or breaks its rule."""
    values = flatten(c)
    for name, rule in rules.items():
        if name not in values:
            raise InputError(f"config.{name} is missing; expected {rule.allowed}.")
        check_rule(name, values[name], rule)


def check_rule(name, value, rule):
    """Raises InputError, with the nearest name, for a value that breaks its rule."""
    try:
        holds = rule.holds(value)
    except (TypeError, ValueError):
        holds = False
    if not holds:
        near = difflib.get_close_matches(str(value), rule.names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(f"config.{name} = {value!r}; expected {rule.allowed}.{hint}")


def _check_multiple(name, value, divisor_name, divisor):
    if value % divisor:
        below = value // divisor * divisor
        near = [str(n) for n in (below, below + divisor) if n > 0]
        raise InputError(
            f"config.{name} = {value}; expected a multiple of {divisor_name} = "
            f"{divisor}, such as {' or '.join(near)}."
        )


# What a compiled program does not depend on, given its number of prediction slots: the
# numbers that a step traces, the seed, and what only the loop around it reads.
TRACED = {
    "seed",
    *(
        f"corruption.{name}"
        for name in (
            *("rate", "final_rate", "schedule", "schedule_begin", "schedule_end"),
            *("row_rate", "weighting", "corruption_rate", "prediction_rate"),
            *("min_predictions", "mask_frac", "random_frac", "replacement_unit"),
            *("dynamic", "duplicates", "span_lengths", "span_p", "span_min"),
            *("span_max", "ngram_max", "weight_power", "token_loss_decay"),
        )
    ),
    *(
        f"optim.{name}"
        for name in (
            *("num_steps", "peak_learning_rate", "warmup_steps", "decay_begin"),
            *("weight_decay", "clip_norm", "label_smoothing", "z_loss", "b1", "b2"),
            *("eps", "on_nonfinite", "max_skips"),
        )
    ),
    *("eval.seed", "eval.every_steps", "eval.minimal_pairs", "eval.fill_mask"),
    "log.every_steps",
    *(f"checkpoint.{name}" for name in ("every_steps", "keep", "keep_best")),
    "checkpoint.keep_every",
}


def hparams(c):
    """The numbers that a step traces: changing one never recompiles."""
    optim = c.optim
    spikes = {}
    if optim.spike_sigmas is not None:
        spikes["spike_sigmas"] = np.float32(optim.spike_sigmas)
    return (
        settings.hparams(c.corruption)
        | spikes
        | {
            "peak_learning_rate": np.float32(optim.peak_learning_rate),
            "warmup_steps": np.float32(optim.warmup_steps),
            "decay_begin": np.float32(optim.decay_begin),
            "num_steps": np.float32(optim.num_steps),
            "weight_decay": np.float32(optim.weight_decay),
            "clip_norm": np.float32(optim.clip_norm),
            "label_smoothing": np.float32(optim.label_smoothing),
            "z_loss": np.float32(optim.z_loss),
            "b1": np.float32(optim.b1),
            "b2": np.float32(optim.b2),
            "eps": np.float32(optim.eps),
        }
    )


def flatten(c):
    """Returns {"section.field": value}."""
    flat: dict[str, Any] = {}
    for name, value in c.items():
        if isinstance(value, ml_collections.ConfigDict):
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def save(c, workdir):
    """Writes `config.json`, whole or not at all, where it is not there already."""
    path = pathlib.Path(workdir) / "config.json"
    text = json.dumps(c.to_dict(), indent=2, sort_keys=True) + "\n"
    if not path.exists() or path.read_text() != text:
        write_text(path, text)


def load(workdir):
    """Returns the config of a run. Raises InputError where there is none, or where it
    is not one that could have been saved."""
    path = pathlib.Path(workdir) / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"--workdir={workdir} holds no run: no config.json."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise InputError(f"{path} cannot be read: {error}") from error
    # What a file raises that was never a config.
    foreign = ValueError, LookupError, AttributeError, TypeError, RecursionError
    try:
        c = ml_collections.ConfigDict(_tuples(json.loads(text)))
        for name, value in SINCE.items():
            section, _, field = name.rpartition(".")
            if field not in c[section]:
                c[section][field] = value
        c.lock()
        check(c)
    except foreign as error:
        raise InputError(f"{path} is not a saved config: {error}") from error
    return c


def _tuples(value):
    """JSON has lists where a config has tuples."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def check_unchanged(old, new, allowed=()):
    """Raises InputError if a run cannot go on, naming what is not `allowed` to change.

    `old` and `new` are {"section.field": value}, and so is what is returned: all the
    changes, as (old value, new value).
    """
    changes = {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }
    refused = [
        name
        for name in changes
        if name not in allowed and not name.startswith(FREE_ON_RESUME)
    ]
    if refused:
        texts = [f"{n}: {changes[n][0]!r} -> {changes[n][1]!r}" for n in refused]
        raise InputError(
            f"this workdir holds a run with another config: {'; '.join(texts)}. Use "
            f"another --workdir, or go on with --allow_change={','.join(refused)}"
        )
    return changes
