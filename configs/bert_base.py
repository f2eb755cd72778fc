"""BERT-base's masked-LM objective on English Wikipedia, 512-token packed rows.

    python -m mlm_jax.train --config=configs/bert_base.py --workdir=runs/bert_base

110 million parameters, about the 130 billion tokens of BERT's own run. Not run here:
it needs accelerators for days, and Wikipedia, which tensorflow-datasets downloads and
makes under Apache Beam, or which was prepared under `data.data_dir`. Expected by the
literature: held-out masked-LM perplexity near 4 at 15% (Devlin et al. 2019, table 6,
reports 3.99 for 12 layers of width 768).
"""

from configs import base, presets


def get_config(preset=""):
    c = base.get_config()
    c.data.source = "tfds:wikipedia/20230601.en"
    c.data.row_length = 512
    c.data.validation_fraction = 0.005
    c.model.dtype = "bfloat16"
    c.eval.num_rows = 4096
    c.eval.batch_size = 256
    return presets.apply(c, preset)
