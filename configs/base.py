"""Every field, its default and its reason. Other configs import this and change lines.

The defaults are BERT-base's masked-LM objective on the bundled corpus. This file is not
meant to be trained as it stands: see tiny.py, austen.py and bert_base.py.
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config():
    c = ml_collections.ConfigDict()

    c.seed = 0  # initial weights, order of rows, masks and dropout

    c.data = ml_collections.ConfigDict()
    # bundled:austen, files:PATTERN, or tfds:NAME[/CONFIG][:VERSION]
    c.data.source = "bundled:austen"
    # What a document is in files: a file, a blank-line separated block, or a line.
    c.data.document = "file"  # file, blank_line, line
    c.data.on_bad_text = "stop"  # stop, skip, replace: lines that are not UTF-8 text
    c.data.data_dir = "~/tensorflow_datasets"  # where tfds: sources were prepared
    c.data.cache_dir = "runs/cache"  # tokenizers and packed rows, shared between runs
    # Share of the documents that is held out, chosen by hash of their content.
    c.data.validation_fraction = 0.05
    c.data.row_length = 128  # L, tokens in a row, [CLS] and [SEP] included
    c.data.packing = "packed"  # packed, full (RoBERTa's FULL-SENTENCES), single
    c.data.batch_size = 256  # rows in a step, over all devices and micro-batches

    c.tokenizer = ml_collections.ConfigDict()
    # A vocab.txt or tokenizer.json to use instead of training one.
    c.tokenizer.file = placeholder(str)
    c.tokenizer.kind = "wordpiece"  # wordpiece, bpe, unigram
    c.tokenizer.vocab_size = 30522  # BERT's
    c.tokenizer.lowercase = True
    c.tokenizer.strip_accents = (
        True  # BERT's uncased models do; not implied by lowercase
    )

    c.corruption = ml_collections.ConfigDict()
    c.corruption.strategy = "token"  # what is hidden as a whole
    c.corruption.rate = 0.15  # share of the ordinary tokens that is predicted
    # What stands at a predicted position: [MASK], a random token, else the token.
    c.corruption.mask_frac = 0.8
    c.corruption.random_frac = 0.1
    # exact: rate x tokens, rounded; stochastic: rounded at random, unbiased;
    # bernoulli: each token on its own (short rows may get no prediction).
    c.corruption.count = "stochastic"
    c.corruption.min_predictions = 1  # in a row with anything to hide
    # full_vocab also draws special tokens, as BERT and Hugging Face do.
    c.corruption.random_pool = "non_special"

    c.model = ml_collections.ConfigDict()
    c.model.num_layers = 12
    c.model.width = 768
    c.model.num_heads = 12
    c.model.mlp_width = 3072
    c.model.norm_position = "post"  # post (BERT), pre
    c.model.position = "learned"  # learned (BERT), rotary
    c.model.dropout = 0.1
    c.model.dtype = "float32"  # of the computation; parameters are always float32

    c.optim = ml_collections.ConfigDict()
    c.optim.name = "adamw"  # adamw, sgd
    c.optim.num_steps = 1_000_000
    c.optim.peak_learning_rate = 1e-4
    c.optim.warmup_steps = 10_000
    c.optim.schedule = "linear"  # after the warm-up: constant, linear, cosine
    c.optim.weight_decay = 0.01  # kernels and embeddings only
    c.optim.clip_norm = 1.0  # of the gradient of the global mean loss
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-6

    c.parallel = ml_collections.ConfigDict()
    c.parallel.mode = "pmap"  # pmap, shard_map, jit
    c.parallel.mesh = ml_collections.ConfigDict()
    c.parallel.mesh.data = -1  # devices; -1 is all of them
    c.parallel.microbatches = 1  # gradients are summed over this many parts of a batch

    # The exam is the same for every run: masks depend on the row and on these lines.
    c.eval = ml_collections.ConfigDict()
    c.eval.rates = (0.15,)
    c.eval.mask_frac = 0.8
    c.eval.random_frac = 0.1
    c.eval.seed = 0
    c.eval.num_rows = 1024  # held-out rows, a fixed choice; 0 is all
    c.eval.batch_size = 64
    c.eval.every_steps = 10_000
    c.eval.fill_mask = ()  # sentences with [MASK], filled at the end of training

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every_steps = 10_000
    c.checkpoint.keep = 2  # the newest ones

    c.log = ml_collections.ConfigDict()
    c.log.every_steps = 100
    return c.lock()
