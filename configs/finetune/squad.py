"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018), through TFDS.

    python -m mlm_jax.finetune --config=configs/finetune/squad.py:v2.0 \
        --from=runs/bert_base --workdir=runs/squad

Questions of 2.0 may have no answer. Not run yet: TFDS downloads the data.
"""

from configs.finetune import base

VERSIONS = ("v1.1", "v2.0")


def get_config(version="v1.1"):
    if version not in VERSIONS:
        raise ValueError(f"no version {version!r}; expected {', '.join(VERSIONS)}")
    c = base.get_config()
    c.task.kind = "spans"
    c.task.train = f"tfds:squad/{version}#train"
    c.task.validation = f"tfds:squad/{version}#validation"
    c.task.text, c.task.pair, c.task.label = "question", "context", "answers"
    c.task.metric = "f1"
    c.task.stride = 128  # BERT's, as the learning rates
    c.learning_rates = (2e-5, 3e-5, 5e-5)
    c.num_epochs = 3
    return c
