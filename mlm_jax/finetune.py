"""Trains the encoder of a run, with a new head, on a task.

    python -m mlm_jax.finetune --config=configs/finetune/base.py --from=runs/austen \
        --workdir=runs/novels --config.task.train=train.jsonl \
        --config.task.validation=validation.jsonl --config.task.label=novel

Classification and regression of a text or a pair, tags of words, answers in a context;
from JSONL, TSV or TFDS. Every learning rate is tried with every seed; a trial ends when
validation no longer improves. Prints and writes the result to the workdir: `result.md`
and `result.json`; the best trial is kept in `checkpoints`.

A finished trial is kept: run again, the command makes those that are missing. On a CPU
trials come in turn, elsewhere all are one stacked program (--together).
"""

import itertools
import pathlib

import jax
from absl import flags

from mlm_jax import command, huge_pages, processes, trained, workdir
from mlm_jax.errors import InputError
from mlm_jax.finetuning import problem, record, settings, table
from mlm_jax.finetuning.progress import Log
from mlm_jax.finetuning.trials import Trainer, Trial

CONFIG = command.define_config()
WORKDIR = command.define_workdir("where the trials and the result are kept")
FROM = flags.DEFINE_string("from", None, "Directory of the run to start from.")
TOGETHER = flags.DEFINE_integer(
    "together", None, "Trials trained at once; by default 1 on a CPU, else all.", 1
)


def main(arguments):
    del arguments
    c = CONFIG.value
    settings.check(c)
    if not FROM.value:
        raise InputError("--from=DIR is missing: the run whose encoder is trained.")
    start = trained.load(FROM.value)
    directory = pathlib.Path(WORKDIR.value)
    with workdir.held(directory), processes.StopSignal() as stop:
        found = problem.make(
            c, start.tokenizer, start.config.data.row_length, record.labels(directory)
        )
        print(problem.describe(found), flush=True)
        record.begin(directory, c, found, start)
        wanted = [Trial(rate, seed) for rate in c.learning_rates for seed in c.seeds]
        missing = [t for t in wanted if not record.has(directory, t)]
        if missing:
            run(c, found, start, directory, missing, stop)
        result = table.summarise(
            [record.read(directory, t) for t in wanted], found.metric
        )
        text = record.finish(directory, result, found)
    print(text)


def run(c, found, start, directory, missing, stop):
    together = TOGETHER.value or (1 if jax.default_backend() == "cpu" else len(missing))
    trainer = Trainer(c, found, start, together)
    print(trainer.describe(), flush=True)
    log = Log(len(missing), trainer.num_steps, found.metric)
    for some in itertools.batched(missing, together):
        outcomes = trainer.train(list(some), stop, log)
        for trial, outcome in zip(some, outcomes, strict=True):
            record.add(directory, trial, outcome, found.metric)


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main)
