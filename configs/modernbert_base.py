"""ModernBERT-base (Warner et al. 2024) on English Wikipedia, packed 1024-token rows.

    python -m mlm_jax.train --config=configs/modernbert_base.py \
        --workdir=runs/modernbert_base

150 million parameters: pre-LN without biases, GeGLU, rotary positions, two layers of
three with a window of 64 tokens on either side. Not run here: it needs accelerators
for days. Masks, batch and learning rate are the paper's; its text (1.7 trillion tokens
of web and code), its optimizer (StableAdamW) and its schedule are not.
"""

from configs import base, presets


def get_config(preset=""):
    c = base.get_config()
    c.data.source = "tfds:wikipedia/20230601.en"
    c.data.row_length = 1024
    c.data.batch_size = 4608
    c.data.validation_fraction = 0.005
    c.tokenizer.kind = "bpe"
    c.tokenizer.vocab_size = 50368
    c.tokenizer.lowercase = False
    c.tokenizer.strip_accents = False
    c.corruption.rate = 0.3
    c.model.num_layers = 22
    c.model.mlp_width = 1152
    c.model.gated = True
    c.model.bias = False
    c.model.norm_position = "pre"
    c.model.norm_epsilon = 1e-5
    c.model.norm_bias = False
    c.model.embed_norm = True
    c.model.position = "rotary"
    c.model.max_length = 8192
    c.model.rotary_base = 160_000.0
    c.model.global_every = 3
    c.model.window = 64
    c.model.dropout = 0.0
    c.model.attention_dropout = 0.0
    c.model.dtype = "bfloat16"
    c.optim.num_steps = 360_000
    c.optim.warmup_steps = 640
    c.optim.peak_learning_rate = 8e-4
    c.optim.weight_decay = 1e-5
    c.optim.b2 = 0.98
    c.eval.rates = (0.15, 0.3)
    c.eval.num_rows = 4096
    c.eval.batch_size = 256
    return presets.apply(c, preset)
