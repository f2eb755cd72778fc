"""Does a larger model want a higher masking rate?

Wettig et al. 2023 found the best rate to rise with size: 15% for a medium, 20% for a
base, 40% for a large model.
"""

from configs import small
from mlm_jax.experiment.sweep import product, values, zipped

CONFIG = "configs/austen.py"
ARMS = product(
    zipped(
        values("model.width", 64, 128, 256),
        values("model.mlp_width", 256, 512, 1024, label="mlp"),
        values("model.num_heads", 1, 2, 4, label="heads"),
    ),
    values("corruption.rate", 0.1, 0.2, 0.4, 0.6),
)
SEEDS = range(4)
BASELINE = "width=128,mlp=512,heads=2,rate=0.2"
METRIC = "eval/loss@0.15"
SETTINGS = {"eval.rates": (0.15, 0.4)}
SMALL = small.SETTINGS
