"""Hugging Face checkpoints: the numbers of transformers; what is refused, by name."""

import functools
import json
import pathlib
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mlm_jax
from mlm_jax import checkpoint, config, import_hf, program
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from tests.helpers import positions

FIXTURES = pathlib.Path(__file__).parent / "hugging_face"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns `imported(name)`, the workdir of a fixture."""

    @functools.cache
    def make(name):
        workdir = tmp_path_factory.mktemp("imported") / name
        import_hf.run(FIXTURES / name, workdir)
        return workdir

    return make


def load_run(workdir):
    """Returns (model, params, tokenizer)."""
    tokenizer = Tokenizer.load(workdir / "tokenizer.json")
    _, state = checkpoint.restore_latest(workdir)
    model = program.model_of(config.load(workdir), tokenizer.vocab_size)
    return model, state["params"], tokenizer


def outputs(workdir, ids_BxL, segment_BxL):
    """Returns (hidden, logits) float32[B, L, ·] of a run, at every position."""
    model, params, tokenizer = load_run(workdir)
    arrays = ids_BxL, segment_BxL, positions(segment_BxL)
    predict_BxL = np.broadcast_to(np.arange(ids_BxL.shape[1]), ids_BxL.shape)

    @jax.jit
    def apply(params):
        x_BxLxD = model.encoder.apply({"params": params["encoder"]}, *arrays)
        if not model.head:
            return x_BxLxD, x_BxLxD
        hidden, table, bias = model.apply({"params": params}, *arrays, predict_BxL)
        logits_BxLxV = hidden @ table.T + bias[None, None]
        return x_BxLxD, logits_BxLxV[:, :, : tokenizer.vocab_size]

    return jax.device_get(apply(params))


@functools.cache
def expected(name):
    return load_file(FIXTURES / name / "expected.safetensors")


def padded_outputs(name, workdir):
    ids_BxL = expected(name)["ids"].astype(np.int32)
    return outputs(workdir, ids_BxL, expected(name)["mask"].astype(int))


@pytest.mark.parametrize("name", NAMES)
def test_b76_b79_numbers_are_those_of_transformers(name, imported):
    """Padded rows, of which padding itself has no meaning. Two of the checkpoints have
    another epsilon, activation, output matrix, biases or windows."""
    theirs, is_token = expected(name), expected(name)["mask"] > 0
    x_BxLxD, logits_BxLxV = padded_outputs(name, imported(name))
    their_logits = theirs["logits"][:, :, : logits_BxLxV.shape[-1]]
    assert np.abs(x_BxLxD - theirs["hidden"])[is_token].max() <= 1e-5
    assert np.abs(logits_BxLxV - their_logits)[is_token].max() <= 1e-5


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_packed_rows_give_the_same(name, imported):
    """The three texts in one row; windows and positions begin anew in each."""
    theirs, is_token = expected(name), expected(name)["mask"] > 0
    segment_L = np.repeat([1, 2, 3], is_token.sum(1))
    ids_L = theirs["ids"][is_token].astype(np.int32)
    _, logits_BxLxV = outputs(imported(name), ids_L[None], segment_L[None])
    num_tokens = logits_BxLxV.shape[-1]
    their_logits = theirs["logits"][is_token][:, :num_tokens]
    assert np.abs(logits_BxLxV[0] - their_logits).max() <= 1e-5


def test_a_run_says_what_it_was_made_of(imported):
    facts = json.loads((imported("roberta") / "imported.json").read_text())
    c = config.load(imported("roberta"))
    assert facts["model_type"] == "roberta" and len(facts["sha256"]) == 4
    assert (c.model.max_length, c.data.row_length) == (22, 22)
    assert c.model.norm_epsilon == 1e-5


def test_b78_padding_of_the_vocabulary_is_never_an_answer(imported):
    """24 tokens in 32 rows of theirs, in 128 of ours."""
    model, params, tokenizer = load_run(imported("modernbert"))
    assert tokenizer.vocab_size == 24 and model.encoder.vocab_size == 128
    assert (params["encoder"]["embed"]["embedding"][24:] == 0).all()
    text = "the cat [MASK] on the mat"
    (choices,) = mlm_jax.load(imported("modernbert")).fill_mask(text, top=24)
    assert sorted(p for p, _ in choices) == sorted(map(tokenizer.piece, range(24)))
    assert sum(p for _, p in choices) == pytest.approx(1, abs=1e-6)


def test_a_tokenizer_of_robertas_kind():
    tokenizer = Tokenizer.load(FIXTURES / "roberta" / "tokenizer.json")
    assert tokenizer.special == (1, 3, 0, 2, tokenizer.vocab_size - 1)
    tokens, word_start = tokenizer.encode_with_masks("the cat [MASK] to")
    assert [tokenizer.piece(id_) for id_ in tokens] == [
        *("t", "he", "Ġ", "c", "a", "t", "<mask>", "Ġt", "o")
    ]
    assert word_start.tolist() == [1, 0, 1, 0, 0, 0, 1, 1, 0]
    # Typed in a text, a special token's name is text.
    assert tokenizer.special.mask not in tokenizer.encode(["a <mask> b"])[0].tokens


# ---- what is refused ----------------------------------------------------------------


def edit_config(**fields):
    def edit(folder):
        path = folder / "config.json"
        theirs = json.loads(path.read_text()) | fields
        present = {name: value for name, value in theirs.items() if value != "absent"}
        path.write_text(json.dumps(present))

    return edit


def edit_tensors(change):
    def edit(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


def rename_weights(name):
    def edit(folder):
        (folder / "model.safetensors").rename(folder / name)

    return edit


def overwrite(name, content):
    def edit(folder):
        (folder / name).write_bytes(content)

    return edit


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
TABLE = "bert.embeddings.word_embeddings.weight"
HUGE = json.dumps(
    {QUERY: {"dtype": "F32", "shape": [2**20, 2**30], "data_offsets": [0, 2**52]}}
).encode()
REFUSED = {
    "model_type = 'albert'": edit_config(model_type="albert"),
    "Did you mean modernbert": edit_config(model_type="modern_bert"),
    "hidden_act = 'mish'; expected one of gelu": edit_config(hidden_act="mish"),
    "position_embedding_type = 'relative_key'": edit_config(
        position_embedding_type="relative_key"
    ),
    "is_decoder = True": edit_config(is_decoder=True),
    "lacks num_attention_heads": edit_config(num_attention_heads="absent"),
    "num_heads = 3": edit_config(num_attention_heads=3),
    "norm_epsilon = -1.0": edit_config(layer_norm_eps=-1.0),
    "config.json: .*wide is of original type": edit_config(hidden_size="wide"),
    "config.json: 1000000000 layers; there are 4. tensors": edit_config(
        num_hidden_layers=10**9
    ),
    "config.json: .*unsupported operand": edit_config(max_position_embeddings="long"),
    "vocab_size = 23; the tokenizer has 24": edit_config(vocab_size=23),
    "cls.predictions.bias is .24,.; by config.json it would be .25,.": edit_config(
        vocab_size=25
    ),
    "pad_token_id = 1; the tokenizer's is 0": edit_config(pad_token_id=1),
    "key.bias is .16,.; by config.json it would be .32,.": edit_config(hidden_size=32),
    "lacks bert.encoder.layer.2": edit_config(num_hidden_layers=3),
    "has bert.encoder.layer.1.* which this model": edit_config(num_hidden_layers=1),
    f"lacks {QUERY}": edit_tensors(lambda t: t.pop(QUERY)),
    "has classifier.weight, which": edit_tensors(
        lambda t: t.update({"classifier.weight": np.zeros(3, "f4")})
    ),
    f"{QUERY} has values that are not finite": edit_tensors(
        lambda t: t[QUERY].fill(np.nan)
    ),
    "decoder.weight is not bert.embeddings": edit_tensors(
        lambda t: t.update({"cls.predictions.decoder.weight": t[TABLE] + 1})
    ),
    f"{QUERY} is I32; expected one of F64, F32": edit_tensors(
        lambda t: t.update({QUERY: np.zeros((16, 16), "i4")})
    ),
    "has no head for masked tokens .*--without_head": edit_tensors(
        lambda t: [t.pop(name) for name in list(t) if name.startswith("cls.")]
    ),
    "pytorch_model.bin: only safetensors .*save_pretrained": rename_weights(
        "pytorch_model.bin"
    ),
    "has no model.safetensors": rename_weights("other.safetensors"),
    "not whole safetensors": truncate,
    "not whole safetensors: .*": overwrite("model.safetensors", b"PK\x03\x04" * 99),
    "whole safetensors: (?=.*)": overwrite(
        "model.safetensors", struct.pack("<Q", 2**60) + b"{}"
    ),
    "whole safetensors: (?=.).*": overwrite(
        "model.safetensors", struct.pack("<Q", len(HUGE)) + HUGE
    ),
    "config.json is not JSON": overwrite("config.json", b"{"),
    "config.json holds no JSON object": overwrite("config.json", b"[1]"),
    "tokenizer.json is not a tokenizer.json": overwrite("tokenizer.json", b"{}"),
    "mask_token = '<mask>'; this vocabulary's is '.MASK.'": overwrite(
        "tokenizer_config.json", b'{"mask_token": {"content": "<mask>"}}'
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_known_is_refused_by_name(message, tmp_path):
    folder = shutil.copytree(FIXTURES / "bert", tmp_path / "theirs")
    REFUSED[message](folder)
    with pytest.raises(InputError, match=message):
        import_hf.run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("roberta", {"hidden_act": "relu"}, "hidden_act = 'relu'; only 'gelu'"),
        ("modernbert", {"mlp_bias": True}, "mlp_bias = True; only attention_bias"),
        ("modernbert", {"classifier_activation": "relu"}, "hidden_activation = 'gelu'"),
        (
            "modernbert",
            {"layer_types": ["sliding_attention"] + 3 * ["full_attention"]},
            "layer_types = ",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "full_attention.rope_type = 'yarn'",
        ),
        ("modernbert", {"rope_scaling": {"factor": 2}}, "rope_scaling"),
    ],
)
def test_what_a_family_alone_can_have_wrong(name, fields, message, tmp_path):
    folder = shutil.copytree(FIXTURES / name, tmp_path / "theirs")
    edit_config(**fields)(folder)
    with pytest.raises(InputError, match=message):
        import_hf.run(folder, tmp_path / "run")


def test_b81_rows_longer_than_the_positions_are_refused(tmp_path):
    with pytest.raises(InputError, match="row_length = 25; .*max_length = 24"):
        import_hf.run(FIXTURES / "bert", tmp_path / "run", row_length=25)


def test_a_run_is_not_written_over(imported):
    with pytest.raises(InputError, match="holds a run"):
        import_hf.run(FIXTURES / "bert", imported("bert"))


# ---- what is accepted ---------------------------------------------------------------


def test_known_extras_old_names_and_parts_change_nothing(tmp_path, imported, capsys):
    """As in bert-base-uncased: gamma and beta, a pooler, the head of next-sentence
    prediction, copies of the tied matrix; in two files."""
    folder = shutil.copytree(FIXTURES / "bert", tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    bias = "cls.predictions.bias"
    extra = {
        "bert.pooler.dense.weight": np.ones((16, 16), "f4"),
        "cls.seq_relationship.bias": np.ones(2, "f4"),
        "bert.embeddings.position_ids": np.ones((1, 24), "i8"),
        "cls.predictions.decoder.weight": tensors[TABLE].copy(),
        "cls.predictions.decoder.bias": tensors[bias].copy(),
        "species.weight": np.ones(3, "f4"),
    }
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x
        for name, x in (tensors | extra).items()
        if name != bias
    }
    weights = {}
    for number, names in enumerate((sorted(old)[::2], sorted(old)[1::2])):
        weights |= dict.fromkeys(names, f"model-{number}.safetensors")
        save_file({n: old[n] for n in names}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    import_hf.run(folder, tmp_path / "run", ignored=("species",))
    told = capsys.readouterr().out
    assert "left out: bert.embeddings.position_ids, bert.pooler.dense.weight" in told
    assert "species.weight" in told
    for ours, plain in zip(
        *(
            jax.tree.leaves(load_run(run)[1])
            for run in (tmp_path / "run", imported("bert"))
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, plain)
    index.write_text(json.dumps({"weight_map": {TABLE: "../elsewhere.safetensors"}}))
    with pytest.raises(InputError, match="names no safetensors beside it"):
        import_hf.run(folder, tmp_path / "other")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_precisions_become_float32(dtype, tmp_path, imported):
    folder = shutil.copytree(FIXTURES / "bert", tmp_path / "theirs")
    edit_tensors(
        lambda t: t.update({name: x.astype(dtype) for name, x in list(t.items())})
    )(folder)
    import_hf.run(folder, tmp_path / "run")
    jax.tree.map(
        lambda found, x: np.testing.assert_array_equal(found, x.astype(dtype, "C")),
        load_run(tmp_path / "run")[1],
        load_run(imported("bert"))[1],
    )


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_alone_is_used_without_its_head(name, tmp_path):
    """As sentence-transformers save it: no prefix and no head."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    bare = {
        n.removeprefix(f"{name}."): x
        for n, x in tensors.items()
        if n.startswith(f"{name}.")
    }
    save_file(bare, folder / "model.safetensors")
    run = tmp_path / "run"
    import_hf.run(folder, run, without_head=True)
    x_BxLxD, _ = padded_outputs(name, run)
    is_token = expected(name)["mask"] > 0
    assert np.abs(x_BxLxD - expected(name)["hidden"])[is_token].max() <= 1e-5
    with pytest.raises(InputError, match="config.model.head = False"):
        mlm_jax.load(run).fill_mask("the [MASK]")


def test_a_head_can_be_left_out(tmp_path, imported):
    import_hf.run(FIXTURES / "bert", tmp_path / "run", without_head=True)
    (found, _), (kept, _) = (
        padded_outputs("bert", run) for run in (tmp_path / "run", imported("bert"))
    )
    np.testing.assert_allclose(found, kept, atol=1e-6)


def test_a_vocabulary_of_lines(tmp_path):
    """The same pieces as from tokenizer.json; whether case is lost has to be said."""
    folder = shutil.copytree(FIXTURES / "bert", tmp_path / "theirs")
    whole = Tokenizer.load(folder / "tokenizer.json")
    pieces = [whole.piece(id_) for id_ in range(whole.vocab_size)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="--lowercase or --nolowercase"):
        import_hf.run(folder, tmp_path / "run")
    import_hf.run(folder, tmp_path / "run", lowercase=True)
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    text = "The CAT sats on [MASK] unred träe"
    assert tokenizer.special == whole.special
    for ours, theirs in zip(
        *(t.encode_with_masks(text) for t in (tokenizer, whole)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
