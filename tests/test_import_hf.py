"""Hugging Face checkpoints: the numbers of transformers, and what is refused by name."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm_jax import checkpoint, config, import_hf, program
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from tests.helpers import positions

FIXTURES = pathlib.Path(__file__).parent / "hugging_face"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns `imported(name)`, the workdir of a fixture."""

    @functools.cache
    def make(name):
        workdir = tmp_path_factory.mktemp("imported") / name
        import_hf.run(FIXTURES / name, workdir)
        return workdir

    return make


def outputs(workdir, ids_BxL, segment_BxL):
    """Returns (hidden, logits) float32[B, L, ·] of a run, at every position."""
    c = config.load(workdir)
    tokenizer = Tokenizer.load(workdir / "tokenizer.json")
    _, state = checkpoint.restore_latest(workdir)
    model = program.model_of(c, tokenizer.vocab_size)
    arrays = ids_BxL, segment_BxL, positions(segment_BxL)
    predict_BxL = np.broadcast_to(np.arange(ids_BxL.shape[1]), ids_BxL.shape)

    @jax.jit
    def apply(params):
        x_BxLxD = model.encoder.apply({"params": params["encoder"]}, *arrays)
        if not c.model.head:
            return x_BxLxD, None
        hidden, table, bias = model.apply({"params": params}, *arrays, predict_BxL)
        return x_BxLxD, hidden @ table.T + bias[None, None]

    x_BxLxD, logits_BxLxV = apply(state["params"])
    if logits_BxLxV is not None:
        logits_BxLxV = np.asarray(logits_BxLxV)[:, :, : tokenizer.vocab_size]
    return np.asarray(x_BxLxD), logits_BxLxV


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_logits_are_those_of_transformers(name, imported):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    mask = expected["mask"] > 0
    x_BxLxD, logits_BxLxV = outputs(
        imported(name), expected["ids"].astype(np.int32), expected["mask"].astype(int)
    )
    num_tokens = logits_BxLxV.shape[-1]
    assert np.abs(x_BxLxD - expected["hidden"])[mask].max() <= 1e-5
    difference = np.abs(logits_BxLxV - expected["logits"][:, :, :num_tokens])
    assert difference[mask].max() <= 1e-5
