"""Every field, its default and its reason. Other configs import this and change lines.

The defaults are BERT-base's masked-LM objective on the bundled corpus. This file is not
meant to be trained as it stands: see tiny.py, austen.py and bert_base.py.
"""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config():
    c = ml_collections.ConfigDict()

    c.seed = 0  # initial weights, order of rows, masks and dropout
    # The workdir of a run whose weights this one begins with, instead of random ones.
    # Its tokenizer is used too, and its `model` must be the same.
    c.init_from = placeholder(str)

    c.data = ml_collections.ConfigDict()
    # bundled:austen, files:PATTERN, tfds:NAME[/CONFIG][:VERSION][#FEATURE], or some of
    # them, each with its share of the training rows: "0.7 tfds:lm1b + 0.3 files:*.txt".
    c.data.source = "bundled:austen"
    # What a document is in files: a file, a blank-line separated block, or a line.
    c.data.document = "file"  # file, blank_line, line
    c.data.on_bad_text = "stop"  # stop, skip, replace: lines that are not UTF-8 text
    c.data.data_dir = "~/tensorflow_datasets"  # where tfds: sources are kept
    c.data.cache_dir = "runs/cache"  # tokenizers and packed rows, shared between runs
    # Share of the documents that is held out, chosen by hash of their content.
    c.data.validation_fraction = 0.05
    c.data.row_length = 128  # L, tokens in a row, [CLS] and [SEP] included
    c.data.packing = "packed"  # packed, full (RoBERTa's FULL-SENTENCES), single
    c.data.batch_size = 256  # rows in a step, over all devices and micro-batches
    # Smaller batches first: (steps, rows), …, such as ((1000, 64), (1000, 128)).
    c.data.batch_ramp = ()
    # Training rows damaged on disk that a process leaves out before it stops.
    c.data.max_bad_rows = 0

    c.tokenizer = ml_collections.ConfigDict()
    # A vocab.txt or tokenizer.json to use instead of training one.
    c.tokenizer.file = placeholder(str)
    c.tokenizer.kind = "wordpiece"  # wordpiece, bpe, unigram
    c.tokenizer.vocab_size = 30522  # BERT's
    c.tokenizer.max_characters = 100_000_000  # learned from at most about so many
    c.tokenizer.lowercase = True
    c.tokenizer.strip_accents = (
        True  # BERT's uncased models do; not implied by lowercase
    )

    c.corruption = ml_collections.ConfigDict()
    # Hidden as a whole: token, word, span (of words), ngram (p(n) ~ 1/n), pmi.
    c.corruption.strategy = "token"
    # Words in a span: geometric (SpanBERT's p = 0.2, at most 10), uniform or inverse,
    # from span_min to span_max; those two are equal for a fixed number.
    c.corruption.span_lengths = "geometric"
    c.corruption.span_p = 0.2
    c.corruption.span_min = 1
    c.corruption.span_max = 10
    c.corruption.ngram_max = 3  # ALBERT's
    # For pmi: a list made by mine_collocations, or any file of one collocation a line.
    c.corruption.collocations = placeholder(str)
    c.corruption.rate = (
        0.15  # share of the ordinary tokens that is hidden and predicted
    )
    # The rate may go to another one between two shares of the training.
    c.corruption.schedule = "constant"  # constant, linear, cosine, step
    c.corruption.final_rate = placeholder(float)
    c.corruption.schedule_begin = 0.0
    c.corruption.schedule_end = 1.0
    # Or each row draws its own, uniformly from (low, high); () for no such draw.
    c.corruption.row_rate = ()
    c.corruption.weighting = "equal"  # of predictions: equal, inverse_rate (diffusion)
    # Wettig et al. 2023 tell what is hidden from what is predicted.
    c.corruption.corruption_rate = placeholder(float)  # None: `rate`
    c.corruption.prediction_rate = placeholder(float)  # None: all that is hidden
    # More predictions than hidden tokens: views of a row with other tokens hidden.
    c.corruption.views = 1
    # What stands at a predicted position: [MASK], a random token, else the token.
    c.corruption.mask_frac = 0.8
    c.corruption.random_frac = 0.1
    # exact: rate x tokens, rounded; stochastic: rounded at random, unbiased;
    # bernoulli: each token on its own (short rows may get no prediction).
    c.corruption.count = "stochastic"
    c.corruption.min_predictions = 1  # in a row with anything to hide
    # full_vocab also draws special tokens, as BERT and Hugging Face do.
    # Which tokens are hidden more often: uniform, inverse_frequency, running_loss (what
    # the model finds hard); weights are raised to a power.
    c.corruption.token_weights = "uniform"
    c.corruption.weight_power = 1.0
    c.corruption.token_loss_decay = 0.99  # of the running loss, a prediction's update
    c.corruption.random_pool = "non_special"  # non_special, full_vocab, unigram
    c.corruption.replacement_unit = (
        "token"  # one draw of mask/random/keep a token, unit
    )
    c.corruption.dynamic = True  # new masks each epoch; else `duplicates` masks a row
    c.corruption.duplicates = 10  # BERT's

    c.model = ml_collections.ConfigDict()
    c.model.num_layers = 12
    c.model.width = 768
    c.model.num_heads = 12
    c.model.mlp_width = 3072
    c.model.activation = "gelu"  # gelu (exact, BERT's), gelu_tanh, silu, relu
    c.model.gated = False  # the MLP: GeGLU with gelu, SwiGLU with silu
    c.model.bias = True  # of the dense layers; decoder_bias is that of the logits
    c.model.norm = "layer_norm"  # layer_norm, rms_norm
    c.model.norm_position = "post"  # post (BERT), pre
    c.model.norm_epsilon = 1e-12
    c.model.norm_bias = True
    # Whether the embeddings are normed; None: with post norms. With pre norms it
    # replaces the first one, that of layer 0's attention (ModernBERT).
    c.model.embed_norm = placeholder(bool)
    c.model.token_types = 0  # rows that tell sentences apart (BERT: 2); 0 is no table
    c.model.position = "learned"  # learned (BERT), rotary
    # The most tokens that positions are for, rows of the learned table; None:
    # data.row_length.
    c.model.max_length = placeholder(int)
    c.model.rotary_base = 10_000.0
    # One layer in so many, the first among them, attends to its whole segment, the
    # others to `window` tokens on either side (ModernBERT: 3, and 64).
    c.model.global_every = 1
    c.model.window = 64
    c.model.local_rotary_base = 10_000.0  # of those others
    c.model.head = True  # False only for an encoder that was imported without one
    c.model.tied = True  # whether the output matrix is the token embedding
    c.model.decoder_bias = True
    c.model.dropout = 0.1  # of the embeddings and of what each sublayer adds
    c.model.attention_dropout = 0.1  # of the attention weights
    # Layers in a turn of the scan over layers: more run faster and compile slower.
    # None: all of up to 12 layers, else 1; 1 on a TPU.
    c.model.scan_unroll = placeholder(int)
    # What the backward pass makes anew, for less memory: none, dots (all but products
    # with weights), full.
    c.model.remat = "none"
    c.model.dtype = "float32"  # of the computation; parameters are always float32

    c.optim = ml_collections.ConfigDict()
    # adamw, stable_adamw, lamb, lion, adafactor, muon (with AdamW for what is no
    # matrix), sgd
    c.optim.name = "adamw"
    c.optim.num_steps = 1_000_000
    c.optim.peak_learning_rate = 1e-4
    c.optim.warmup_steps = 10_000
    # After the warm-up: constant, linear, cosine, one_minus_sqrt, inverse_sqrt. With a
    # warm-up of half the steps, linear is one cycle.
    c.optim.schedule = "linear"
    c.optim.decay_begin = 0  # the step after which it decays, if later than the warm-up
    c.optim.weight_decay = 0.01  # kernels and embeddings only
    c.optim.clip_norm = 1.0  # of the gradient of the global mean loss
    c.optim.label_smoothing = 0.0  # share of the target spread over all classes
    c.optim.z_loss = 0.0  # weight of log(Z)^2, which keeps logits from drifting (PaLM)
    c.optim.b1 = 0.9
    c.optim.b2 = 0.999
    c.optim.eps = 1e-6
    # A loss or gradient that is not finite never changes the state. stop: the run ends;
    # skip: it goes on with the next batch, unless more than max_skips are so in a row,
    # or more than them and 1% of all.
    c.optim.on_nonfinite = "stop"
    c.optim.max_skips = 5
    # Updates not made either, and counted with them: those whose loss or gradient norm
    # is so many standard deviations above the mean of the last 128, such as 6.0.
    c.optim.spike_sigmas = placeholder(float)

    c.parallel = ml_collections.ConfigDict()
    c.parallel.mode = "pmap"  # pmap, shard_map, jit
    c.parallel.mesh = ml_collections.ConfigDict()
    # Devices: rows are spread over data x fsdp, parameters and moments kept in parts
    # over fsdp x tensor, products shared out over tensor. -1 is all the others.
    c.parallel.mesh.data = -1
    c.parallel.mesh.fsdp = 1  # above 1 with jit only, as tensor
    c.parallel.mesh.tensor = 1
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
    # Minimal pairs to judge at each evaluation: a file or directory in BLiMP's form, or
    # bundled:agreement. Each token of each sentence is a row of its own.
    c.eval.minimal_pairs = placeholder(str)
    c.eval.fill_mask = ()  # sentences with [MASK], filled at the end of training

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every_steps = 10_000
    c.checkpoint.keep = 2  # the newest ones
    c.checkpoint.keep_every = 0  # and those at multiples of this step; 0 is none
    # And the one with the lowest eval/loss at the first of eval.rates, among those
    # saved at a step that was evaluated.
    c.checkpoint.keep_best = False

    c.log = ml_collections.ConfigDict()
    c.log.every_steps = 100
    return c.lock()
