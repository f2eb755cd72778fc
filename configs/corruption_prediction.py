"""Corruption rate against prediction rate (Wettig et al. 2023), on the tiny model.

    python -m mlm_jax.train --config=configs/corruption_prediction.py:20_40 \
        --workdir=runs/corrupt_20_predict_40

The argument is CORRUPTION_PREDICTION in percent, the paper's six rows: 40_40, 40_20,
20_20, 20_40, 10_40 or 5_40. More predictions than corruptions take several views of
each row, with other tokens hidden: 20_40 costs two encoder passes, 5_40 eight. The
paper found fewer corruptions and more predictions both to help (MNLI 84.5 at 40/40,
86.9 at 5/40). About a minute a pass on two CPU cores.
"""

from configs import tiny

ROWS = ("40_40", "40_20", "20_20", "20_40", "10_40", "5_40")


def get_config(row="40_40"):
    if row not in ROWS:
        raise ValueError(f"no row {row!r}; expected {', '.join(ROWS)}")
    corruption, prediction = (int(percent) / 100 for percent in row.split("_"))
    c = tiny.get_config()
    c.corruption.corruption_rate = corruption
    c.corruption.prediction_rate = prediction
    c.corruption.views = max(1, round(prediction / corruption))
    return c
