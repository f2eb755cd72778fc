"""What a Hugging Face `config.json` means as a config's `model` section, and back.

A family is a `model_type`. What differs between families is data: names of config
fields, values that a family has no choice in, and names of tensors, as found in
transformers 5.24 (`models/{bert,roberta,distilbert,modernbert}/`).
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlm_jax.errors import InputError
from mlm_jax.interop import modernbert
from mlm_jax.interop.modernbert import other_value

# Theirs to ours. The three names of the tanh approximation round differently.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
POST_NORM = {
    "gated": False,
    "bias": True,
    "norm": "layer_norm",
    "norm_position": "post",
    "norm_bias": True,
    "embed_norm": True,
    "position": "learned",
    "global_every": 1,
    "decoder_bias": True,
}


class Family(NamedTuple):
    """How one `model_type` differs from the others.

    `fields` are theirs by ours, `defaults` what theirs are where they are not given,
    `fixed` ours that it has no choice in, and `required` theirs that may have no other
    value. `modules` are the names of their modules by our paths, `{}` a layer; several
    of ours of one name are its rows, in that order. Tensors of the encoder begin with
    `prefix`, unless it was saved alone. `type_rows` is how many token types it has, if
    a model has none of its own; 0 if it has no table of them.
    """

    architecture: str
    prefix: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    modules: Mapping[str, str]
    type_rows: int
    input_names: tuple[str, ...] = ("input_ids", "attention_mask")


_BERT_FIELDS = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "token_types": "type_vocab_size",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
_BERT_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
_BERT_REQUIRED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_BERT_BLOCKS = {
    "encoder/embed": "embeddings.word_embeddings",
    "encoder/position_embed": "embeddings.position_embeddings",
    "encoder/type_embed": "embeddings.token_type_embeddings",
    "encoder/embed_norm": "embeddings.LayerNorm",
    "encoder/blocks/attention/query": "encoder.layer.{}.attention.self.query",
    "encoder/blocks/attention/key": "encoder.layer.{}.attention.self.key",
    "encoder/blocks/attention/value": "encoder.layer.{}.attention.self.value",
    "encoder/blocks/attention/out": "encoder.layer.{}.attention.output.dense",
    "encoder/blocks/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "encoder/blocks/mlp/up": "encoder.layer.{}.intermediate.dense",
    "encoder/blocks/mlp/down": "encoder.layer.{}.output.dense",
    "encoder/blocks/mlp_norm": "encoder.layer.{}.output.LayerNorm",
}

FAMILIES = {
    "bert": Family(
        architecture="BertForMaskedLM",
        prefix="bert.",
        fields=_BERT_FIELDS,
        defaults=_BERT_DEFAULTS,
        fixed=POST_NORM,
        required=_BERT_REQUIRED,
        modules=_BERT_BLOCKS
        | {
            "transform/dense": "cls.predictions.transform.dense",
            "transform/norm": "cls.predictions.transform.LayerNorm",
            "decoder": "cls.predictions.decoder",
            "": "cls.predictions",
        },
        type_rows=2,
        input_names=("input_ids", "token_type_ids", "attention_mask"),
    ),
    "roberta": Family(
        architecture="RobertaForMaskedLM",
        prefix="roberta.",
        fields=_BERT_FIELDS,
        defaults=_BERT_DEFAULTS,
        # The activation of its head is always GELU.
        fixed=POST_NORM | {"activation": "gelu"},
        required=_BERT_REQUIRED,
        modules=_BERT_BLOCKS
        | {
            "transform/dense": "lm_head.dense",
            "transform/norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "": "lm_head",
        },
        type_rows=1,
    ),
    "distilbert": Family(
        architecture="DistilBertForMaskedLM",
        prefix="distilbert.",
        fields={
            "num_layers": "n_layers",
            "width": "dim",
            "num_heads": "n_heads",
            "mlp_width": "hidden_dim",
            "activation": "activation",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "max_length": "max_position_embeddings",
            "tied": "tie_word_embeddings",
        },
        defaults={
            "activation": "gelu",
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "tie_word_embeddings": True,
        },
        fixed=POST_NORM | {"norm_epsilon": 1e-12, "token_types": 0},
        required={},
        modules={
            "encoder/embed": "embeddings.word_embeddings",
            "encoder/position_embed": "embeddings.position_embeddings",
            "encoder/embed_norm": "embeddings.LayerNorm",
            "encoder/blocks/attention/query": "transformer.layer.{}.attention.q_lin",
            "encoder/blocks/attention/key": "transformer.layer.{}.attention.k_lin",
            "encoder/blocks/attention/value": "transformer.layer.{}.attention.v_lin",
            "encoder/blocks/attention/out": "transformer.layer.{}.attention.out_lin",
            "encoder/blocks/attention_norm": "transformer.layer.{}.sa_layer_norm",
            "encoder/blocks/mlp/up": "transformer.layer.{}.ffn.lin1",
            "encoder/blocks/mlp/down": "transformer.layer.{}.ffn.lin2",
            "encoder/blocks/mlp_norm": "transformer.layer.{}.output_layer_norm",
            "transform/dense": "vocab_transform",
            "transform/norm": "vocab_layer_norm",
            "decoder": "vocab_projector",
            "": "vocab_projector",
        },
        type_rows=0,
    ),
    "modernbert": Family(
        architecture="ModernBertForMaskedLM",
        prefix="model.",
        fields={
            "num_layers": "num_hidden_layers",
            "width": "hidden_size",
            "num_heads": "num_attention_heads",
            "mlp_width": "intermediate_size",
            "activation": "hidden_activation",
            "bias": "attention_bias",
            "norm_epsilon": "norm_eps",
            "norm_bias": "norm_bias",
            "dropout": "embedding_dropout",
            "attention_dropout": "attention_dropout",
            "max_length": "max_position_embeddings",
            "tied": "tie_word_embeddings",
            "decoder_bias": "decoder_bias",
        },
        defaults=modernbert.DEFAULTS,
        fixed={
            "gated": True,
            "norm": "layer_norm",
            "norm_position": "pre",
            "embed_norm": True,
            "position": "rotary",
            "token_types": 0,
        },
        required={},
        modules={
            "encoder/embed": "embeddings.tok_embeddings",
            "encoder/embed_norm": "embeddings.norm",
            "encoder/blocks/attention/query": "layers.{}.attn.Wqkv",
            "encoder/blocks/attention/key": "layers.{}.attn.Wqkv",
            "encoder/blocks/attention/value": "layers.{}.attn.Wqkv",
            "encoder/blocks/attention/out": "layers.{}.attn.Wo",
            "encoder/blocks/attention_norm": "layers.{}.attn_norm",
            "encoder/blocks/mlp/gate": "layers.{}.mlp.Wi",
            "encoder/blocks/mlp/up": "layers.{}.mlp.Wi",
            "encoder/blocks/mlp/down": "layers.{}.mlp.Wo",
            "encoder/blocks/mlp_norm": "layers.{}.mlp_norm",
            "encoder/final_norm": "final_norm",
            "transform/dense": "head.dense",
            "transform/norm": "head.norm",
            "decoder": "decoder",
            "": "decoder",
        },
        type_rows=0,
    ),
}


def family_of(theirs, where):
    """Returns (model_type, Family). Raises InputError for one that is not known."""
    found = theirs.get("model_type")
    if not isinstance(found, str) or found not in FAMILIES:
        near = difflib.get_close_matches(str(found), FAMILIES, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(
            f"{where}: model_type = {found!r}; expected one of "
            f"{', '.join(FAMILIES)}.{hint}"
        )
    return found, FAMILIES[found]


def unused_positions(model_type, pad_id):
    """RoBERTa counts positions from the one after that of padding."""
    return pad_id + 1 if model_type == "roberta" else 0


def to_ours(theirs, *, where, pad_id):
    """Returns the fields of a `model` section that are those of their config.

    Raises InputError, naming the field, for what this encoder cannot do.
    """
    model_type, family = family_of(theirs, where)
    for name, value in family.required.items():
        if theirs.get(name, value) != value:
            raise other_value(where, name, theirs[name], repr(value))
    ours = dict(family.fixed)
    for name, their_name in family.fields.items():
        value = theirs.get(their_name, family.defaults.get(their_name))
        if value is None:
            raise InputError(f"{where} lacks {their_name}.")
        if name == "activation":
            value = _activation(where, their_name, value)
        if ours.get(name, value) != value:
            raise other_value(where, their_name, value, repr(ours[name]))
        ours[name] = value
    ours["max_length"] -= unused_positions(model_type, pad_id)
    if model_type == "modernbert":
        ours |= modernbert.to_ours(theirs, ours, where)
    return ours


def to_theirs(model, *, model_type, special, vocab_size):
    """Returns their `config.json` for a `model` section, `max_length` given.

    Raises InputError, naming the field, where no such model computes the same.
    """
    family = FAMILIES[model_type]
    model = dict(model)
    if model["embed_norm"] is None:
        model["embed_norm"] = model["norm_position"] == "post"
    for name, value in family.fixed.items():
        if model[name] != value:
            raise InputError(
                f"config.model.{name} = {model[name]!r}; {family.architecture} of "
                f"transformers has only {value!r}, so this run cannot be exported as "
                f"{model_type}."
            )
    theirs = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "pad_token_id": special.pad,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
        "dtype": "float32",
    }
    theirs |= {their_name: model[name] for name, their_name in family.fields.items()}
    activation = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    theirs[family.fields["activation"]] = activation[model["activation"]]
    theirs["max_position_embeddings"] += unused_positions(model_type, special.pad)
    if family.type_rows and not model["token_types"]:
        theirs["type_vocab_size"] = family.type_rows
    if model_type == "modernbert":
        theirs |= modernbert.to_theirs(model, theirs, special)
    return theirs


def default_type(model):
    """Returns the model_type that a run is exported as, if it was not imported."""
    return "modernbert" if model["position"] == "rotary" else "bert"


def _activation(where, name, value):
    if value not in ACTIVATIONS:
        near = difflib.get_close_matches(str(value), ACTIVATIONS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(
            f"{where}: {name} = {value!r}; expected one of {', '.join(ACTIVATIONS)}."
            f"{hint}"
        )
    return ACTIVATIONS[value]
