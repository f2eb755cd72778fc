"""What share of the tokens should be hidden?

Nine rates, compared by held-out loss at common rates after equally many steps, as in
table 1 of Wettig et al. 2023.
"""

from configs import small
from mlm_jax.experiment.sweep import values

CONFIG = "configs/austen.py"
ARMS = values("corruption.rate", 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
SEEDS = range(6)
BASELINE = "rate=0.15"
METRIC = "eval/loss@0.15"
SETTINGS = {"eval.rates": (0.15, 0.4)}
SMALL = small.SETTINGS
