"""BERT-large's masked-LM objective, as `bert_base` in all but size.

    python -m mlm_jax.train --config=configs/bert_large.py --workdir=runs/bert_large

335 million parameters. Not run here, for the same reasons. The backward pass makes
anew what is not a product with weights: without that, 16 rows of 512 tokens and the
state do not fit into the 16 GiB of a TPU v5e.
"""

from configs import bert_base


def get_config(preset=""):
    c = bert_base.get_config(preset)
    c.model.num_layers = 24
    c.model.width = 1024
    c.model.num_heads = 16
    c.model.mlp_width = 4096
    c.model.remat = "dots"
    return c
