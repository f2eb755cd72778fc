"""Should the masking rate change during training?

Ankner et al. 2024 found a rate that falls from 30% to 15% better than either, and one
that rises worse.
"""

from configs import small
from mlm_jax.experiment.sweep import arm, chain


def changing(name, schedule, first, last):
    return arm(
        name,
        corruption__rate=first,
        corruption__schedule=schedule,
        corruption__final_rate=last,
    )


CONFIG = "configs/austen.py"
ARMS = chain(
    arm("constant 0.15", corruption__rate=0.15),
    arm("constant 0.3", corruption__rate=0.3),
    changing("linear down", "linear", 0.3, 0.15),
    changing("linear up", "linear", 0.15, 0.3),
    changing("cosine down", "cosine", 0.3, 0.15),
    changing("step down", "step", 0.3, 0.15),
)
SEEDS = range(6)
BASELINE = "constant 0.3"
METRIC = "eval/loss@0.15"
SMALL = small.SETTINGS
