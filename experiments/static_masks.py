"""Are new masks in every epoch better than a few fixed ones?

Table 1 of Liu et al. 2019 (RoBERTa) compares ten fixed masks a row with new ones. Over
the few epochs of a small variant the fixed ones hardly come again, so it trains on the
shortest of the novels.
"""

from configs import small
from mlm_jax.experiment.sweep import arm, chain

CONFIG = "configs/austen.py"
ARMS = chain(
    arm("dynamic", corruption__dynamic=True),
    *(
        arm(
            f"duplicates={number}",
            corruption__dynamic=False,
            corruption__duplicates=number,
        )
        for number in (1, 4, 10)
    ),
)
SEEDS = range(6)
BASELINE = "dynamic"
METRIC = "eval/loss@0.15"
SMALL = small.SETTINGS | {
    "data.source": "files:mlm_jax/data/austen/northangerabbey.txt",
    "data.document": "blank_line",
}
