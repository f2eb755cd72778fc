"""Goes on training from the weights of another run, an imported one for example.

    python -m mlm_jax.import_hf --from=downloads/bert-base-uncased --workdir=runs/bert
    python -m mlm_jax.train --config=configs/from_run.py:runs/bert \
        --workdir=runs/bert_austen --config.data.source=bundled:austen

The model and the tokenizer are those of the run whose workdir is given; the text, the
masks and the optimizer are this file's. Rows are of 128 tokens, or of as many as the
other run's.
"""

from configs import base
from mlm_jax import config


def get_config(workdir=""):
    c = base.get_config()
    if workdir:
        run = config.load(workdir)
        c.init_from = workdir
        c.model.update(run.model)
        c.model.max_length = run.model.max_length or run.data.row_length
        c.data.row_length = min(c.data.row_length, run.data.row_length)
        c.tokenizer.vocab_size = run.tokenizer.vocab_size
    c.data.batch_size = 32
    c.optim.num_steps = 2000
    c.optim.peak_learning_rate = 5e-5
    c.optim.warmup_steps = 100
    c.eval.every_steps = 200
    c.checkpoint.every_steps = 200
    c.log.every_steps = 10
    return c
