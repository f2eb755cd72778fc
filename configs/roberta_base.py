"""RoBERTa-base (Liu et al. 2019) on English Wikipedia, 512-token full rows.

    python -m mlm_jax.train --config=configs/roberta_base.py \
        --workdir=runs/roberta_base

125 million parameters. Not run here: it needs accelerators for days. Optimizer and
batch are those of the paper's table 9; its text is ten times as much as Wikipedia.
"""

from configs import base, presets


def get_config(preset="roberta"):
    c = base.get_config()
    c.data.source = "tfds:wikipedia/20230601.en"
    c.data.row_length = 512
    c.data.packing = "full"
    c.data.batch_size = 8192
    c.data.validation_fraction = 0.005
    c.tokenizer.kind = "bpe"
    c.tokenizer.vocab_size = 50265
    c.tokenizer.lowercase = False
    c.tokenizer.strip_accents = False
    c.model.norm_epsilon = 1e-5
    c.model.token_types = 1
    c.model.dtype = "bfloat16"
    c.optim.num_steps = 500_000
    c.optim.warmup_steps = 24_000
    c.optim.peak_learning_rate = 6e-4
    c.optim.b2 = 0.98
    c.eval.num_rows = 4096
    c.eval.batch_size = 256
    return presets.apply(c, preset)
