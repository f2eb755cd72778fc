"""The presets and the configs of published tables: what they say, and that they run."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import (
    austen,
    bert_base,
    bert_split,
    corruption_prediction,
    presets,
    tiny,
)
from mlm_jax import config, program
from mlm_jax.corruption import settings
from tests.test_executors import FakeTokenizer, make_batch, make_mesh

ROOT = pathlib.Path(__file__).parents[1]
TABLES = [(bert_split, row) for row in bert_split.ROWS]
TABLES += [(corruption_prediction, row) for row in corruption_prediction.ROWS]


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("module", [tiny, austen, bert_base])
def test_presets_pass_in_every_config(module, name):
    c = module.get_config(name)
    config.check(c)
    for field, value in presets.PRESETS[name].items():
        assert c.corruption[field] == value
    assert module.get_config().corruption.views == 1


def test_an_unknown_preset_is_refused_with_the_names():
    with pytest.raises(ValueError, match="bert, roberta, hf, electra, modern"):
        tiny.get_config("robert")


def test_bert_masks_come_again_every_ten_epochs_and_no_others():
    periods = {
        name: int(settings.hparams(tiny.get_config(name).corruption)["mask_period"])
        for name in presets.PRESETS
    }
    assert periods.pop("bert") == 10
    assert set(periods.values()) == {settings.NEVER}


@pytest.mark.parametrize("row", bert_split.ROWS)
def test_the_splits_are_those_of_the_table(row):
    """MASK, SAME and RND in percent (Devlin et al. 2019, appendix C.2)."""
    mask, same, random = map(int, row.split("_"))
    assert mask + same + random == 100
    corruption = bert_split.get_config(row).corruption
    assert corruption.mask_frac == mask / 100
    assert corruption.random_frac == random / 100


@pytest.mark.parametrize("row", corruption_prediction.ROWS)
def test_corruption_and_prediction_rates_are_met(row):
    corruption, prediction = (int(percent) / 100 for percent in row.split("_"))
    c = corruption_prediction.get_config(row)
    c.data.row_length = 64
    config.check(c)
    num_rows = 512
    batch = make_batch(0, num_rows, 64)
    ordinary = np.random.default_rng(0).integers(5, 60, (num_rows, 64))
    batch["tokens"] = ordinary.astype(np.int32)
    batch["tokens"][:, 0], batch["tokens"][:, -1] = 2, 3
    batch["segment"] = np.ones_like(batch["tokens"])
    corrupt = program.train_corrupt(c, FakeTokenizer, np.ones(60))
    numbers = settings.hparams(c.corruption)
    out, ledger = jax.jit(corrupt)(jax.random.key(0), batch, numbers, 0.0)
    # A view hides the corruption rate; a row's views together predict the other.
    assert ledger["num_hidden"] / ledger["num_maskable"] == pytest.approx(
        corruption, abs=0.002
    )
    predicted = (out["weights"] > 0).sum() / (num_rows * 62)
    assert predicted == pytest.approx(prediction, abs=0.002)
    assert ledger["num_overflow"] == 0


@functools.cache
def traced_step(module, row):
    c = module.get_config(row)
    c.data.row_length = 16
    built = program.make_program(c, FakeTokenizer, np.ones(60), make_mesh(1))
    return jax.eval_shape(built.train_step, built.abstract_state, make_batch(0))


@pytest.mark.parametrize("module, row", TABLES)
def test_the_rows_of_the_tables_make_a_step(module, row):
    state, metrics = traced_step(module, row)
    assert state.params["bias"].shape == (128,)
    assert metrics["loss"].shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("module, row", TABLES)
def test_the_rows_of_the_tables_run(module, row, tmp_path, tmp_path_factory):
    name = module.__name__.rsplit(".", 1)[-1]
    cache = tmp_path_factory.getbasetemp() / "cache"
    result = subprocess.run(
        [sys.executable, "-m", "mlm_jax.train", f"--config=configs/{name}.py:{row}"]
        + [f"--workdir={tmp_path}", f"--config.data.cache_dir={cache}"]
        + ["--config.optim.num_steps=5", "--config.eval.num_rows=64"],
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            # Rows that differ in numbers alone are one program.
            "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
