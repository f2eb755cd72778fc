"""Should whole words, spans or n-grams be hidden, and at which rate?

Single tokens are the exam of all, so what is compared is what a strategy teaches about
single tokens (after table 6 of Wettig et al. 2023; PMI masking needs a list, see
`python -m mlm_jax.mine_collocations`, and is left to a file of one's own).
"""

from configs import small
from mlm_jax.experiment.sweep import product, values

CONFIG = "configs/austen.py"
ARMS = product(
    values("corruption.strategy", "token", "word", "span", "ngram"),
    values("corruption.rate", 0.15, 0.2, 0.3, 0.4),
)
SEEDS = range(6)
BASELINE = "strategy=token,rate=0.15"
METRIC = "eval/loss@0.15"
SETTINGS = {"eval.rates": (0.15, 0.4)}
SMALL = small.SETTINGS
