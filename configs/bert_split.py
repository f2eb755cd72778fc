"""The six corruption splits of BERT's appendix C.2, on the tiny model.

    python -m mlm_jax.train --config=configs/bert_split.py:80_10_10 \
        --workdir=runs/split_80_10_10

The argument is MASK_SAME_RND in percent, as in the paper's table: 80_10_10, 100_0_0,
80_0_20, 80_20_0, 0_20_80 or 0_0_100. About a minute each on two CPU cores. In the paper
the split hardly moved fine-tuning (MNLI 83.6 to 84.4); what differs is what a model
learns of text without [MASK].
"""

from configs import tiny

ROWS = ("80_10_10", "100_0_0", "80_0_20", "80_20_0", "0_20_80", "0_0_100")


def get_config(row="80_10_10"):
    if row not in ROWS:
        raise ValueError(f"no row {row!r}; expected {', '.join(ROWS)}")
    mask, _, random = (int(percent) / 100 for percent in row.split("_"))
    c = tiny.get_config()
    c.corruption.rate = 0.15
    c.corruption.mask_frac = mask
    c.corruption.random_frac = random
    return c
