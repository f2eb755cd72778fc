"""What of a ModernBERT's `config.json` is not the same field under another name."""

from mlm_jax.errors import InputError

KINDS = "full_attention", "sliding_attention"
THETAS = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
DEFAULTS = {
    "hidden_activation": "gelu",
    "attention_bias": False,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "decoder_bias": True,
}


def to_ours(theirs, ours, where):
    """Returns the fields beside `ours`; raises InputError as `families.to_ours`."""
    same = {
        "mlp_bias": "attention_bias",
        "classifier_bias": "attention_bias",
        "classifier_activation": "hidden_activation",
    }
    for name, other in same.items():
        expected = theirs.get(other, DEFAULTS[other])
        value = theirs.get(name, DEFAULTS[other])
        if value != expected:
            raise other_value(where, name, value, f"{other} = {expected!r}")
    dropout = theirs.get("mlp_dropout", 0)
    if dropout != ours["dropout"]:
        expected = f"embedding_dropout = {ours['dropout']}"
        raise other_value(where, "mlp_dropout", dropout, expected)
    every = theirs.get("global_attn_every_n_layers", 3)
    if kinds := theirs.get("layer_types"):
        every = _every(kinds)
        if len(kinds) != ours["num_layers"] or kinds != _layer_types(len(kinds), every):
            expected = "full_attention in the first and every k-th layer"
            raise other_value(where, "layer_types", kinds, expected)
    width = theirs.get("local_attention", 128)
    return {
        "global_every": every,
        "window": width // 2,
        "rotary_base": _base(theirs, "full_attention", "global_rope_theta", where),
        "local_rotary_base": _base(
            theirs, "sliding_attention", "local_rope_theta", where
        ),
    }


def _every(kinds):
    """Returns the period of the global layers, by where the second one is."""
    places = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return places[1] if len(places) > 1 else len(kinds)


def _layer_types(num_layers, every):
    return [KINDS[i % every > 0] for i in range(num_layers)]


def _base(theirs, kind, old_name, where):
    """The base of the angles, in the new format of their config or in the old one."""
    if theirs.get("rope_scaling"):
        raise other_value(where, "rope_scaling", theirs["rope_scaling"], "none")
    rope = (theirs.get("rope_parameters") or {}).get(kind) or {}
    if rope.get("rope_type", "default") != "default":
        name = f"rope_parameters.{kind}.rope_type"
        raise other_value(where, name, rope["rope_type"], "'default'")
    return float(rope.get("rope_theta") or theirs.get(old_name) or THETAS[old_name])


def to_theirs(model, theirs, special):
    """Returns the fields beside `theirs`."""
    bases = model["rotary_base"], model["local_rotary_base"]
    return {
        "mlp_bias": model["bias"],
        "classifier_bias": model["bias"],
        "classifier_activation": theirs["hidden_activation"],
        "mlp_dropout": model["dropout"],
        "layer_types": _layer_types(model["num_layers"], model["global_every"]),
        "local_attention": 2 * model["window"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in zip(KINDS, bases, strict=True)
        },
        "cls_token_id": special.cls,
        "sep_token_id": special.sep,
    }


def other_value(where, name, value, expected):
    """Returns the error for a value that this encoder cannot have."""
    return InputError(f"{where}: {name} = {value!r}; only {expected} can be imported.")
