"""Does it matter how the number of hidden tokens of a row is drawn?

Bernoulli draws are Hugging Face's, exact counts BERT's, stochastic rounding ours. We
know of no published comparison.
"""

from configs import small
from mlm_jax.experiment.sweep import values

CONFIG = "configs/austen.py"
ARMS = values("corruption.count", "stochastic", "exact", "bernoulli")
SEEDS = range(6)
BASELINE = "count=stochastic"
METRIC = "eval/loss@0.15"
SMALL = small.SETTINGS
