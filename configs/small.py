"""What makes an experiment small: settings for `SMALL` in `experiments/*.py`.

Rows of half the length, a vocabulary of 512 and 600 steps: about 20 seconds a run on
two CPU cores. A larger vocabulary would not leave the loss of the unigram entropy
behind in that time.
"""

SETTINGS = {
    "tokenizer.vocab_size": 512,
    "data.row_length": 64,
    "data.batch_size": 16,
    "optim.num_steps": 600,
    "optim.warmup_steps": 30,
    "eval.num_rows": 256,
    "eval.every_steps": 100,
    "checkpoint.every_steps": 600,
}
