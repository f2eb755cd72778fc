"""The nine tasks of GLUE (Wang et al. 2019), through TFDS.

    python -m mlm_jax.finetune --config=configs/finetune/glue.py:sst2 \
        --from=runs/bert_base --workdir=runs/sst2

The test labels of GLUE are not public, so figures are those of validation, and the
metric is that of the benchmark. Not run yet: TFDS downloads the data.
"""

from configs.finetune import base

# Columns, and the metric with the label that counts as positive.
TASKS = {
    "cola": ("sentence", None, "matthews", None),
    "sst2": ("sentence", None, "accuracy", None),
    "mrpc": ("sentence1", "sentence2", "f1", "equivalent"),
    "stsb": ("sentence1", "sentence2", "pearson", None),
    "qqp": ("question1", "question2", "f1", "duplicate"),
    "mnli": ("premise", "hypothesis", "accuracy", None),
    "qnli": ("question", "sentence", "accuracy", None),
    "rte": ("sentence1", "sentence2", "accuracy", None),
    "wnli": ("sentence1", "sentence2", "accuracy", None),
}


def get_config(name=""):
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; expected {', '.join(TASKS)}")
    c = base.get_config()
    c.task.kind = "regression" if name == "stsb" else "classification"
    c.task.text, c.task.pair, c.task.metric, c.task.positive = TASKS[name]
    # MNLI has two validation splits: of the training genres, and of others.
    validation = "validation_matched" if name == "mnli" else "validation"
    c.task.train = f"tfds:glue/{name}#train"
    c.task.validation = f"tfds:glue/{name}#{validation}"
    if name == "mnli":
        c.task.test = "tfds:glue/mnli#validation_mismatched"
    c.learning_rates = (2e-5, 3e-5, 5e-5)  # Devlin et al. 2019
    c.num_epochs = 4
    return c
