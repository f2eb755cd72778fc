"""What makes an experiment small: settings for `SMALL` in `experiments/*.py`.

Rows of half the length, a small vocabulary and 300 steps: about 15 seconds a run on two
CPU cores, in which the model leaves the loss of the unigram entropy behind.
"""

SETTINGS = {
    "tokenizer.vocab_size": 1024,
    "data.row_length": 64,
    "data.batch_size": 32,
    "optim.num_steps": 300,
    "optim.warmup_steps": 30,
    "eval.num_rows": 256,
    "eval.every_steps": 100,
    "checkpoint.every_steps": 300,
}
