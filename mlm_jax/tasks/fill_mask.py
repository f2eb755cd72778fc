"""The most probable tokens where a text has [MASK]."""

import jax
import jax.numpy as jnp
import numpy as np

from mlm_jax.errors import InputError


def fill_mask(model, params, tokenizer, text, *, row_length, top=5):
    """Returns, for each [MASK] of `text`, a list of (piece, probability), best first.

    The text is one segment. Raises InputError if it has no [MASK] or is too long.
    """
    tokens_T = tokenizer.encode_with_masks(text).tokens
    special = tokenizer.special
    tokens_T = np.concatenate([[special.cls], tokens_T, [special.sep]])
    predict_M = np.flatnonzero(tokens_T == special.mask)
    if not len(predict_M):
        raise InputError(
            f"no [MASK] in {text!r}: write it in capitals, where a word is."
        )
    if len(tokens_T) > row_length:
        raise InputError(
            f"the text has {len(tokens_T)} tokens with [CLS] and [SEP]; "
            f"this model reads at most {row_length}."
        )
    padding = (0, row_length - len(tokens_T))
    tokens_L = np.pad(tokens_T, padding, constant_values=special.pad)
    segment_L = np.pad(np.ones_like(tokens_T), padding)
    position_L = np.pad(np.arange(len(tokens_T)), padding)

    hidden_BxMxD, table_VxD, bias_V = model.apply(
        {"params": params},
        tokens_L[None],
        segment_L[None],
        position_L[None],
        predict_M[None],
    )
    logits_MxV = (hidden_BxMxD[0] @ table_VxD.T + bias_V[None])[
        :, : tokenizer.vocab_size
    ]
    p_MxK, id_MxK = jax.lax.top_k(jax.nn.softmax(logits_MxV.astype(jnp.float32)), top)
    return [
        [
            (tokenizer.piece(int(id_)), float(p))
            for id_, p in zip(id_K, p_K, strict=True)
        ]
        for id_K, p_K in zip(np.asarray(id_MxK), np.asarray(p_MxK), strict=True)
    ]


def describe(text, filled):
    """Returns the answer as lines for a person."""
    lines = [text]
    for number, choices in enumerate(filled, 1):
        label = f"[MASK] {number}" if len(filled) > 1 else "[MASK]"
        pieces = "  ".join(f"{piece} {p:.1%}" for piece, p in choices)
        lines.append(f"  {label}: {pieces}")
    return "\n".join(lines)
