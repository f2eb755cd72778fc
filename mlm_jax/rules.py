"""Kinds of rules for the fields of a config, and what older versions had instead."""

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

# Fields that runs of an older version have not saved, with what that version did.
SINCE: dict[str, Any] = {
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
