"""Does it matter which tokens the random replacements are drawn from?

BERT and Hugging Face draw from the whole vocabulary, special tokens included. We know
of no published comparison.
"""

from configs import small
from mlm_jax.experiment.sweep import values

CONFIG = "configs/austen.py"
ARMS = values("corruption.random_pool", "non_special", "full_vocab", "unigram")
SEEDS = range(6)
BASELINE = "random_pool=non_special"
METRIC = "eval/loss@0.15"
SMALL = small.SETTINGS
