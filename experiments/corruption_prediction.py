"""Does it help to corrupt less and predict more?

Table 4 of Wettig et al. 2023, at equally many steps: rows of text, not encoder passes.
More predictions than corruptions take several views of a row, with other tokens hidden,
so 5% corrupted with 40% predicted costs eight passes a step.
"""

from configs import corruption_prediction as table
from configs import small
from mlm_jax.experiment.sweep import arm, chain

CONFIG = "configs/austen.py"
ARMS = chain(
    *(
        arm(
            f"corrupted={corrupted},predicted={predicted}",
            corruption__corruption_rate=corrupted / 100,
            corruption__prediction_rate=predicted / 100,
            corruption__views=max(1, predicted // corrupted),
        )
        for row in table.ROWS
        for corrupted, predicted in [map(int, row.split("_"))]
    )
)
SEEDS = range(6)
BASELINE = "corrupted=40,predicted=40"
METRIC = "eval/loss@0.15"
SETTINGS = {"eval.rates": (0.15, 0.4)}
SMALL = small.SETTINGS
