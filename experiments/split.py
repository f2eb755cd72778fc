"""What should stand at a predicted position: [MASK], a random token, or the token?

The six splits of BERT's appendix C.2 (Devlin et al. 2019) at 15%. The exam has BERT's
80/10/10 for all of them, so a model that never met [MASK] is examined on it.
"""

from configs import bert_split, small
from mlm_jax.experiment.sweep import arm, chain

CONFIG = "configs/austen.py"
ARMS = chain(
    *(
        arm(
            f"mask={mask},same={same},random={random}",
            corruption__mask_frac=mask / 100,
            corruption__random_frac=random / 100,
        )
        for row in bert_split.ROWS
        for mask, same, random in [map(int, row.split("_"))]
    )
)
SEEDS = range(6)
BASELINE = "mask=80,same=10,random=10"
METRIC = "eval/loss@0.15"
SETTINGS = {"corruption.rate": 0.15}
SMALL = small.SETTINGS
