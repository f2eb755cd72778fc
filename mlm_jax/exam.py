"""A trained model takes exams: held-out rows under frozen masks, of any strategy."""

from mlm_jax import config, frozen_masks, parallel, workdir
from mlm_jax.corruption.units import STRATEGIES
from mlm_jax.data import rows
from mlm_jax.errors import InputError
from mlm_jax.rules import RATES
from mlm_jax.tasks import answers

# Of these no file is needed beside the run.
WITHOUT_A_LIST = tuple(name for name in STRATEGIES if name != "pmi")


def check(rates, strategies, collocations):
    """Raises InputError for exams that there are none of."""
    if not RATES.holds(rates):
        raise InputError(f"rates {rates}; expected {RATES.allowed}.")
    for name in strategies:
        if name not in STRATEGIES:
            raise InputError(
                f"strategy {name!r}; expected one of {', '.join(STRATEGIES)}."
            )
    if ("pmi" in strategies) == (collocations is None):
        raise InputError(
            f"collocations {collocations!r} with strategies {', '.join(strategies)}; "
            "pmi needs a list (mine_collocations makes one), no other reads it."
        )


def examine(
    trained,
    *,
    rates=None,
    strategies=("token",),
    collocations=None,
    num_rows=None,
    batch_size=None,
    log=print,
    make_tick=None,
):
    """Returns {"strategy@rate": report} as `tasks.answers.report` has it, with the
    `mask_hash` of the exam.

    `rates` and `num_rows` are by default those of the run's own evaluations (0 rows is
    all). `log` is told what is read, `make_tick(rows, name)` of each exam.
    """
    c = trained.config
    rates = c.eval.rates if rates is None else tuple(rates)
    check(rates, strategies, collocations)
    store = rows.prepare(c.data, config.tokenizer_of(c), log=log)
    workdir.check_data(trained.workdir, store, ())
    tokenizer = store.tokenizer
    shards = parallel.num_row_shards(trained.mesh)
    batch_size = -(-(batch_size or c.eval.batch_size) // shards) * shards
    predict = answers.make_predict(trained.model, tokenizer.vocab_size, trained.mesh)
    reports = {}
    for strategy in strategies:
        for rate in rates:
            masks = frozen_masks.masks(
                c,
                store,
                strategy=strategy,
                rate=rate,
                num_rows=num_rows,
                collocations_file=collocations if strategy == "pmi" else None,
            )
            name = f"{strategy}@{rate:g}"
            tick = make_tick and make_tick(len(masks.rows["row"]), name)
            found = answers.answer(
                predict,
                trained.params,
                masks.rows,
                is_special_V=tokenizer.is_special,
                batch_size=batch_size,
                tick=tick,
            )
            reports[name] = {"mask_hash": masks.mask_hash} | answers.report(
                found, store.token_counts, tokenizer.byte_lengths
            )
    return reports
