"""A small BERT from scratch on six novels by Jane Austen: the default of `make train`.

    python -m mlm_jax.train --config=configs/austen.py --workdir=runs/austen

1.5 million parameters; about seven minutes on two CPU cores (19,000 tokens a second).
Held-out loss about 3.62 at 15% (the unigram entropy there is 6.02), accuracy 35%, and
still falling.
"""

from configs import base, presets


def get_config(preset=""):
    c = base.get_config()
    c.tokenizer.vocab_size = 8192
    c.data.batch_size = 16
    # Twice the predictions of 15% for little more work: it learns about twice as fast.
    c.corruption.rate = 0.3
    c.model.num_layers = 2
    c.model.width = 128
    c.model.num_heads = 2
    c.model.mlp_width = 512
    c.model.norm_position = "pre"
    # Learned positions stay at the unigram loss for the first million tokens and more.
    c.model.position = "rotary"
    c.model.dropout = 0.0  # eight passes over the rows: nothing to hold back yet
    c.model.attention_dropout = 0.0
    c.optim.num_steps = 3500
    c.optim.peak_learning_rate = 3e-3
    c.optim.warmup_steps = 100
    c.optim.b2 = 0.98  # RoBERTa's
    c.eval.num_rows = 0
    c.eval.every_steps = 500
    c.checkpoint.every_steps = 500
    c.log.every_steps = 10
    c.eval.fill_mask = (
        "Mr. Darcy [MASK] to Elizabeth.",
        "She was very [MASK] to see him.",
        "It is a truth universally [MASK], that he must be in want of a wife.",
        "He was a [MASK] of large fortune.",
        "They walked in the [MASK] after dinner.",
    )
    return presets.apply(c, preset)
