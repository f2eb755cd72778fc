"""Makes the checkpoints beside this file, by transformers and with its logits.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/hugging_face/make.py tests/hugging_face

Random weights, so that no bias is zero and no scale is one. `expected.safetensors` has
ids and attention mask of padded rows, and what transformers makes of them: `hidden`,
the encoder's output, and `logits`. The same functions make models of other shapes for
the slow tests, which need torch too.
"""

import pathlib
import sys

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers

LENGTHS = 20, 13, 5
WORDS = "the a cat dog sat on mat ran to house tree was red blue old new un ##s ##ed"
BERT_NAMES = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
ROBERTA_NAMES = "<s>", "<pad>", "</s>", "<unk>", "<mask>"
POST_NORM = dict(
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=24,
)
MODELS = {
    "bert": ("bert", POST_NORM),
    # Everything that is not the default: epsilon, activation, output matrix.
    "bert_untied": (
        "bert",
        POST_NORM
        | dict(
            num_hidden_layers=1,
            num_attention_heads=2,
            layer_norm_eps=0.1,
            hidden_act="gelu_new",
            tie_word_embeddings=False,
            type_vocab_size=3,
        ),
    ),
    "roberta": (
        "roberta",
        POST_NORM
        | dict(layer_norm_eps=1e-5, type_vocab_size=1, max_position_embeddings=24),
    ),
    "distilbert": (
        "distilbert",
        dict(n_layers=2, dim=16, n_heads=2, hidden_dim=40, max_position_embeddings=24),
    ),
    # A window that matters in 20 tokens, and a vocabulary with padding.
    "modernbert": (
        "modernbert",
        dict(
            num_hidden_layers=4,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=64,
            local_attention=6,
            vocab_size=32,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    "modernbert_biased": (
        "modernbert",
        dict(
            num_hidden_layers=3,
            hidden_size=16,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=64,
            local_attention=4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            classifier_bias=True,
        ),
    ),
}


def wordpiece():
    pieces = [*BERT_NAMES, *WORDS.split()]
    library = tokenizers.Tokenizer(
        models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    return library, BERT_NAMES


def byte_level():
    """RoBERTa's kind, of ASCII letters and spaces only."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*ROBERTA_NAMES[:-1], "Ġ", *letters, "Ġt", "he", "Ġthe", ROBERTA_NAMES[-1]]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    library = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>")
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.post_processor = tokenizers.processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0)
    )
    return library, ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


def tokenizer_of(model_type):
    library, names = byte_level() if model_type == "roberta" else wordpiece()
    mask = tokenizers.AddedToken(names[-1], lstrip=True, special=True)
    library.add_special_tokens([*names[:-1], mask])
    roles = "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, **dict(zip(roles, names, strict=True))
    )


def model_of(model_type, settings, tokenizer, seed=0):
    """Returns a masked LM of random weights."""
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    config = transformers.AutoConfig.for_model(model_type, **ids | settings)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    size = 0.3 * (16 / config.hidden_size) ** 0.5
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_scale = "norm" in name.lower() and name.endswith("weight")
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if is_scale else size * noise)
    return model


def rows(tokenizer, lengths=LENGTHS, seed=0):
    """Returns (ids, attention mask) of rows framed by [CLS] and [SEP], padded."""
    rng = np.random.default_rng(seed)
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    ids = rng.integers(0, len(tokenizer), mask.shape)
    ids = np.where(ids == tokenizer.pad_token_id, tokenizer.mask_token_id, ids)
    ids[:, 0] = tokenizer.cls_token_id
    ids[np.arange(len(ids)), np.array(lengths) - 1] = tokenizer.sep_token_id
    return np.where(mask, ids, tokenizer.pad_token_id), mask.astype(np.int64)


def outputs(model, ids, mask):
    """Returns {hidden, logits} of transformers."""
    with torch.no_grad():
        found = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            output_hidden_states=True,
        )
    return {
        "hidden": found.hidden_states[-1].numpy(),
        "logits": found.logits.numpy(),
    }


def make(folder, model_type, settings, seed=0, lengths=LENGTHS):
    """Writes one checkpoint; returns its model."""
    tokenizer = tokenizer_of(model_type)
    model = model_of(model_type, settings, tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids, mask = rows(tokenizer, lengths)
    arrays = {"ids": ids, "mask": mask} | outputs(model, ids, mask)
    save_file(arrays, folder / "expected.safetensors")
    return model


if __name__ == "__main__":
    for name, (model_type, settings) in MODELS.items():
        make(pathlib.Path(sys.argv[1]) / name, model_type, settings)
