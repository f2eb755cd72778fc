"""A small BERT from scratch on six novels by Jane Austen: the default of `make train`.

    python -m mlm_jax.train --config=configs/austen.py --workdir=runs/austen

RESULT
"""

from configs import base


def get_config():
    c = base.get_config()
    c.tokenizer.vocab_size = 8192
    c.data.batch_size = 32
    c.model.num_layers = 4
    c.model.width = 256
    c.model.num_heads = 4
    c.model.mlp_width = 1024
    c.model.norm_position = "pre"
    # Learned positions stay at the unigram loss for the first million tokens and more.
    c.model.position = "rotary"
    c.model.dropout = 0.0
    c.optim.num_steps = 1500
    c.optim.peak_learning_rate = 1e-3
    c.optim.warmup_steps = 100
    c.optim.b2 = 0.98
    c.eval.num_rows = 0
    c.eval.every_steps = 100
    c.checkpoint.every_steps = 250
    c.log.every_steps = 10
    c.eval.fill_mask = (
        "Mr. Darcy [MASK] to Elizabeth.",
        "She was very [MASK] to see him.",
        "It is a truth universally [MASK], that he must be in want of a wife.",
        "Emma could not [MASK] it.",
        "He was a [MASK] of large fortune.",
    )
    return c
