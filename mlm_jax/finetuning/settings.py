"""What a fine-tuning config must satisfy. Imports no jax."""

from mlm_jax import config, rules
from mlm_jax.errors import InputError
from mlm_jax.finetuning import scores

COUNT = rules.at_least(1)
SEEDS = rules.Rule(
    "a tuple of different integers from 0 to 4294967295, such as (0, 1, 2)",
    lambda seeds: (
        len(seeds) > 0
        and len(set(seeds)) == len(seeds)
        and all(isinstance(seed, int) and rules.SEED.holds(seed) for seed in seeds)
    ),
)
LEARNING_RATES = rules.Rule(
    "a tuple of different numbers above 0, such as (1e-4, 3e-4)",
    lambda rates: (
        len(rates) > 0
        and len(set(rates)) == len(rates)
        and all(rules.POSITIVE.holds(rate) for rate in rates)
    ),
)
OPTIONAL_ROW_LENGTH = rules.Rule(
    f"None, or {rules.ROW_LENGTH.allowed}",
    lambda value: value is None or rules.ROW_LENGTH.holds(value),
)
RULES = {
    "task.kind": rules.one_of(*scores.METRICS),
    "task.row_length": OPTIONAL_ROW_LENGTH,
    "task.stride": COUNT,
    "task.max_answer": COUNT,
    "seeds": SEEDS,
    "learning_rates": LEARNING_RATES,
    "weights": rules.one_of("run", "random"),
    "pooling": rules.one_of("mean", "cls"),
    "dropout": rules.DROPOUT,
    "batch_size": COUNT,
    "num_epochs": COUNT,
    "patience": COUNT,
    "optim.name": rules.RULES["optim.name"],
    "optim.schedule": rules.RULES["optim.schedule"],
    "optim.warmup": rules.FRACTION,
    "optim.weight_decay": rules.NON_NEGATIVE,
    "optim.clip_norm": rules.POSITIVE,
    "optim.b1": rules.BELOW_ONE,
    "optim.b2": rules.BELOW_ONE,
    "optim.eps": rules.POSITIVE,
}
# What may change between two calls for one workdir: which trials there are, and where
# the examples, which have to be the same, come from.
FREE = (
    *("seeds", "learning_rates"),
    *(f"task.{name}" for name in ("train", "validation", "test", "data_dir")),
)


def check(c):
    """Raises InputError, naming the field, at the first value that cannot be used."""
    config.check_rules(c, RULES)
    for name in ("train", "validation"):
        if not c.task[name]:
            raise InputError(
                f"config.task.{name} is missing; expected FILE.jsonl, FILE.tsv or "
                "tfds:NAME#SPLIT."
            )
    if c.task.kind == "spans" and c.task.pair is None:
        raise InputError("config.task.pair is missing; for spans it is the context.")
    if c.task.kind == "tagging" and c.task.pair is not None:
        raise InputError(
            f"config.task.pair = {c.task.pair!r}; a tagged sentence has no second text."
        )
    known = scores.METRICS[c.task.kind]
    if c.task.metric is not None:
        config.check_rule("task.metric", c.task.metric, rules.one_of(*known))
    if c.task.metric == "f1" and c.task.kind == "classification":
        if c.task.positive is None:
            raise InputError(
                "config.task.positive is missing; f1 is that of one label, "
                "macro_f1 the mean over all."
            )
