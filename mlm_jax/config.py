"""What a config must satisfy, the numbers a step traces, and how it is saved.

Imports no jax, so that a wrong value is refused at once.
"""

import difflib
import json
import pathlib
from typing import Any

import ml_collections
import numpy as np

from mlm_jax.corruption import settings
from mlm_jax.errors import InputError
from mlm_jax.files import write_text
from mlm_jax.rules import RULES, SINCE

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
    _check_model(c)
    if c.init_from is not None and c.tokenizer.file is not None:
        raise InputError(
            f"config.tokenizer.file = {c.tokenizer.file}; expected None, as "
            f"config.init_from = {c.init_from} has a tokenizer."
        )
    _check_mesh(c)


def _check_model(c):
    heads = c.model.num_heads
    _check_multiple("model.width", c.model.width, "model.num_heads", heads)
    if c.model.position == "rotary":  # turns pairs of a head's units
        _check_multiple("model.width", c.model.width, "2 x model.num_heads", 2 * heads)
    if c.model.norm == "rms_norm" and c.model.norm_bias:
        raise InputError(
            "config.model.norm_bias = True; expected False with norm = rms_norm."
        )
    if c.model.max_length is not None and c.model.max_length < c.data.row_length:
        raise InputError(
            f"config.data.row_length = {c.data.row_length}; expected at most "
            f"config.model.max_length = {c.model.max_length}, the positions there are."
        )


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


def tokenizer_of(c):
    """Returns the `tokenizer` section, its `file` that of `init_from`, if any."""
    if c.init_from is None:
        return c.tokenizer
    return c.tokenizer.to_dict() | {"file": f"{c.init_from}/tokenizer.json"}


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
            *sections, field = name.split(".")
            section = c[sections[0]] if sections else c
            if field not in section:
                section[field] = value
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
