"""Runs as Hugging Face checkpoints: bit for bit what came in; what cannot go out."""

import json
import pathlib

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from configs import base
from mlm_jax import (
    checkpoint,
    config,
    export_hf,
    import_hf,
    optim,
    program,
    state,
)
from mlm_jax.data import hugging_face
from mlm_jax.data.tokenizer import KINDS, Tokenizer
from mlm_jax.errors import InputError
from tests import helpers
from tests.test_import_hf import FIXTURES, NAMES, load_run

NOVEL = pathlib.Path(__file__).parents[1] / "mlm_jax/data/austen/northangerabbey.txt"
TEXTS = NOVEL.read_text().lower().split("\n\n")[10:60]
ROBERTA_POSITIONS = "roberta.embeddings.position_embeddings.weight"


@pytest.mark.parametrize("name", NAMES)
def test_b76_a_round_trip_is_bit_equal(name, tmp_path):
    """Tensors by name, and the config; but for what a vocabulary has as padding (B78),
    and what nothing reads: RoBERTa's positions before the first, and an untied BERT's
    first bias."""
    run, folder, again = (tmp_path / part for part in ("run", "out", "again"))
    import_hf.run(FIXTURES / name, run)
    export_hf.run(run, folder)
    tensors, expected = (
        load_file(where / "model.safetensors") for where in (folder, FIXTURES / name)
    )
    vocab_size = Tokenizer.load(folder / "tokenizer.json").vocab_size
    assert tensors.keys() == expected.keys()
    for tensor_name, tensor in tensors.items():
        kept = expected[tensor_name]
        if (name, tensor_name) == ("bert_untied", "cls.predictions.bias"):
            kept = expected["cls.predictions.decoder.bias"]
        if len(kept) == 32 and name == "modernbert" and kept.shape != tensor.shape:
            kept = kept[:vocab_size]
        if tensor_name == ROBERTA_POSITIONS:
            assert (tensor[:2] == 0).all()
            kept, tensor = kept[2:], tensor[2:]
        np.testing.assert_array_equal(tensor, kept)

    theirs = json.loads((folder / "config.json").read_text())
    original = json.loads((FIXTURES / name / "config.json").read_text())
    assert theirs["vocab_size"] == vocab_size == {"roberta": 35}.get(name, 24)
    ids = {"vocab_size", "cls_token_id", "sep_token_id"}
    for field in theirs.keys() - ids:
        assert theirs[field] == original[field], field

    import_hf.run(folder, again)
    jax.tree.map(np.testing.assert_array_equal, load_run(again)[1], load_run(run)[1])
    tokenizers_ = [Tokenizer.load(w / "tokenizer.json").digest for w in (run, again)]
    assert tokenizers_[0] == tokenizers_[1]


def make_run(directory, **model):
    """A run of our own of random weights, saved at step 0."""
    c = base.get_config()
    small = dict(num_layers=2, width=16, num_heads=2, mlp_width=24, scan_unroll=1)
    c.model.update(small | model)
    c.data.row_length = 16
    tokenizer = Tokenizer.train(
        TEXTS, kind="wordpiece", vocab_size=100, lowercase=True, strip_accents=True
    )
    tokenizer.save(directory / "tokenizer.json")
    params = helpers.random_params(program.model_of(c, tokenizer.vocab_size))
    first = state.first_state(
        jax.random.key(0), config.hparams(c), params, optim.OPTIMIZERS["adamw"]
    )
    with checkpoint.Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(0, first)
    config.save(c, directory)
    return c


@pytest.mark.parametrize(
    "model, model_type",
    [
        ({}, "bert"),
        ({"token_types": 2, "activation": "gelu_tanh", "tied": False}, "bert"),
        ({}, "distilbert"),
        ({"norm_epsilon": 1e-5, "token_types": 1}, "roberta"),
        (
            dict(
                norm_position="pre",
                embed_norm=True,
                position="rotary",
                gated=True,
                activation="silu",
                decoder_bias=False,
                global_every=2,
                window=3,
            ),
            "modernbert",
        ),
    ],
)
def test_b78_a_run_of_our_own_comes_back(model, model_type, tmp_path):
    """Without the rows that make its vocabulary of 100 a multiple of 128."""
    run, folder = tmp_path / "run", tmp_path / "out"
    c = make_run(run, **model)
    export_hf.run(run, folder, model_type=model_type)
    theirs = json.loads((folder / "config.json").read_text())
    table = load_file(folder / "model.safetensors")
    (rows,) = {len(x) for n, x in table.items() if "_embeddings" in n and len(x) > 30}
    assert theirs["vocab_size"] == rows == 100 and theirs["model_type"] == model_type
    import_hf.run(folder, tmp_path / "again")
    again = config.load(tmp_path / "again")
    same = set(c.model) - {"max_length", "embed_norm", "scan_unroll"}
    assert {n: again.model[n] for n in same} == {n: c.model[n] for n in same}
    _, ours, _ = load_run(run)
    for path, found in jax.tree_util.tree_leaves_with_path(
        load_run(tmp_path / "again")[1]
    ):
        leaf = ours
        for key in path:
            leaf = leaf[key.key]
        name = jax.tree_util.keystr(path)
        if len(leaf) == 128:
            leaf, found = leaf[:100], found[:100]
        if model_type == "modernbert" and "attention_norm" in name:
            leaf, found = leaf[1:], found[1:]  # the first layer's has no use
        np.testing.assert_array_equal(found, leaf, err_msg=name)


@pytest.mark.parametrize(
    "model, model_type, message",
    [
        ({"norm_position": "pre"}, None, "norm_position = 'pre'; BertForMaskedLM .*"),
        ({"norm_position": "pre", "position": "rotary"}, None, "gated = False; Modern"),
        ({"norm": "rms_norm", "norm_bias": False}, None, "norm = 'rms_norm'"),
        ({"decoder_bias": False}, None, "decoder_bias = False"),
        ({"norm_epsilon": 1e-5}, "distilbert", "norm_epsilon = 1e-05"),
        ({"token_types": 2}, "distilbert", "token_types = 2"),
        ({"activation": "relu"}, "roberta", "activation = 'relu'"),
    ],
)
def test_what_no_such_model_computes_is_refused(model, model_type, message, tmp_path):
    make_run(tmp_path / "run", **model)
    with pytest.raises(InputError, match=f"config.model.{message}"):
        export_hf.run(tmp_path / "run", tmp_path / "out", model_type=model_type)
    assert not (tmp_path / "out").exists()


def test_an_encoder_alone_and_a_full_folder_are_refused(tmp_path):
    import_hf.run(FIXTURES / "bert", tmp_path / "run", without_head=True)
    with pytest.raises(InputError, match="head = False"):
        export_hf.run(tmp_path / "run", tmp_path / "out")
    import_hf.run(FIXTURES / "bert", tmp_path / "whole")
    with pytest.raises(InputError, match="there already"):
        export_hf.run(tmp_path / "whole", FIXTURES / "bert")


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_tokenizer_frames_and_masks_as_we_do(kind, tmp_path):
    """By the `tokenizers` library alone, as transformers uses it."""
    tokenizer = Tokenizer.train(
        TEXTS, kind=kind, vocab_size=400, lowercase=True, strip_accents=True
    )
    hugging_face.write_tokenizer(
        tokenizer, tmp_path, max_length=16, input_names=("input_ids",)
    )
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = tokenizer.special
    for text in (TEXTS[0][:60], "one [MASK] two", "[MASK] one", "one [MASK]."):
        ours = [special.cls, *tokenizer.encode_with_masks(text).tokens, special.sep]
        assert library.encode(text).ids == ours, text
    pair = library.encode("one", "two")
    assert pair.ids.count(special.sep) == 2 and pair.type_ids[-1] == 1
    read = hugging_face.read_tokenizer(tmp_path, {}, lowercase=None)
    assert read.special == special
