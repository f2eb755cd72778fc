"""Every field of a fine-tuning, its default and its reason, for local files.

    python -m mlm_jax.finetune --config=configs/finetune/base.py --from=runs/austen \
        --workdir=runs/novels --config.task.train=train.jsonl \
        --config.task.validation=validation.jsonl --config.task.label=novel

glue.py and squad.py take their data from TFDS.
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config():
    c = ml_collections.ConfigDict()

    c.task = ml_collections.ConfigDict()
    # classification, regression, tagging, spans (of a context that answer a question).
    c.task.kind = "classification"
    # FILE.jsonl, FILE.tsv, or tfds:NAME[/CONFIG][:VERSION]#SPLIT. Training stops by
    # validation; the test is met once, by the best epoch of each run.
    c.task.train = placeholder(str)
    c.task.validation = placeholder(str)
    c.task.test = placeholder(str)
    c.task.data_dir = "~/tensorflow_datasets"  # where tfds: data sets are kept
    # Columns, by name; `pair` is the second text, for spans the context.
    c.task.text = "text"
    c.task.pair = placeholder(str)
    c.task.label = "label"
    # What validation goes by. Classification: accuracy, macro_f1, matthews, f1 (of the
    # label `positive`); regression: pearson, spearman; tagging: accuracy, macro_f1,
    # entity_f1 (tags B-…, I-…, O); spans: f1, exact. None: the first of its kind.
    c.task.metric = placeholder(str)
    c.task.positive = placeholder(str)
    # Tokens in a row; None: what the longest example needs, at most the run's own.
    c.task.row_length = placeholder(int)
    c.task.stride = 64  # tokens from one window of a context to the next
    c.task.max_answer = 30  # tokens of an answer

    # Every learning rate is tried with every seed; the one with the best median is
    # reported. A seed is that of the head, the order of examples and dropout.
    c.seeds = (0, 1, 2, 3, 4)
    c.learning_rates = (3e-4, 1e-3, 3e-3)  # for small encoders; BERT-base wants 2e-5
    # run: all of its encoder; random: the same network with new weights, to compare.
    c.weights = "run"
    c.pooling = "mean"  # of a text's vectors: mean, cls
    c.dropout = 0.1  # in the encoder and before the output, whatever the run had
    c.batch_size = 32
    c.num_epochs = 10  # at most, and where the learning rate reaches 0
    c.patience = 3  # epochs without a better validation, after which a run ends

    c.optim = ml_collections.ConfigDict()
    c.optim.name = "adamw"
    c.optim.schedule = "linear"  # after the warm-up, as in configs/base.py
    c.optim.warmup = 0.1  # share of all steps
    c.optim.weight_decay = 0.01
    c.optim.clip_norm = 1.0
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-6
    return c.lock()
