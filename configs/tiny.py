"""A very small model for a look at the whole pipeline, and for tests.

    python -m mlm_jax.train --config=configs/tiny.py --workdir=runs/tiny

240,000 parameters; under a minute on two CPU cores. Held-out loss 5.7 at 15%: it has
just left the unigram entropy of 6.02.
"""

from configs import base


def get_config():
    c = base.get_config()
    c.tokenizer.vocab_size = 2048
    c.data.row_length = 64
    c.data.batch_size = 16
    c.corruption.rate = 0.3
    c.model.num_layers = 2
    c.model.width = 64
    c.model.num_heads = 2
    c.model.mlp_width = 256
    c.model.norm_position = "pre"
    c.model.position = "rotary"
    c.model.dropout = 0.0
    c.optim.num_steps = 1000
    c.optim.peak_learning_rate = 5e-3
    c.optim.warmup_steps = 5
    c.eval.num_rows = 256
    c.eval.every_steps = 250
    c.checkpoint.every_steps = 250
    c.log.every_steps = 10
    c.eval.fill_mask = ("Mr. Darcy [MASK] to Elizabeth.",)
    return c
