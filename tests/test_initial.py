"""A run that begins with the weights of another: all of them, or none."""

import json
import shutil

import jax
import numpy as np
import pytest

import mlm_jax
from configs import from_run
from mlm_jax import checkpoint, config, import_hf, train
from mlm_jax.errors import InputError
from tests.test_import_hf import FIXTURES

WORDS = "the a cat dog sat on mat ran to house tree was red blue old new".split()


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("initial") / "imported"
    import_hf.run(FIXTURES / "bert", workdir)
    return workdir


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(WORDS, 30)) for _ in range(200)))
    return path


def make_config(run, text, **overrides):
    c = from_run.get_config(str(run))
    fields = {
        "data.source": f"files:{text}",
        "data.document": "line",
        "data.cache_dir": str(text.parent / "cache"),
        "data.row_length": 16,
        "data.batch_size": 8,
        "optim.num_steps": 2,
        "optim.warmup_steps": 0,
        "eval.num_rows": 8,
        "checkpoint.every_steps": 1,
        "parallel.mesh.data": 1,
    }
    for name, value in (fields | overrides).items():
        section, _, field = name.rpartition(".")
        target = c
        for part in section.split("."):
            target = target[part] if part else target
        target[field] = value
    return c


def params_of(workdir):
    step, state = checkpoint.restore_latest(workdir)
    return step, state["params"]


@pytest.fixture(scope="module")
def trained(imported, text, tmp_path_factory):
    """Two updates with a learning rate that moves no float32 by a bit."""
    workdir = tmp_path_factory.mktemp("initial") / "run"
    c = make_config(imported, text, **{"optim.peak_learning_rate": 1e-30})
    train.run(c, workdir)
    return workdir


def test_b85_every_parameter_is_taken(trained, imported):
    step, params = params_of(trained)
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, params, params_of(imported)[1])
    tokenizers = [(w / "tokenizer.json").read_bytes() for w in (trained, imported)]
    assert tokenizers[0] == tokenizers[1]


def test_it_stays_on_record_and_the_other_run_is_needed_no_more(
    trained, imported, text, tmp_path
):
    """Killed after its first save it goes on to the same bits."""
    facts = json.loads((trained / "initial.json").read_text())
    _, params = params_of(imported)
    assert facts["digest"] == checkpoint.digest({"params": params})
    assert (facts["from"], facts["step"]) == (str(imported), 0)
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "2")
    kept = shutil.move(imported / "checkpoints", tmp_path / "elsewhere")
    try:
        train.run(config.load(run), run)
    finally:
        shutil.move(kept, imported / "checkpoints")
    digests = [checkpoint.digest(params_of(w)[1]) for w in (run, trained)]
    assert params_of(run)[0] == 2 and digests[0] == digests[1]


def test_before_its_first_save_it_begins_with_the_same_again(
    trained, imported, text, tmp_path
):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    facts = json.loads((run / "initial.json").read_text())
    (run / "initial.json").write_text(json.dumps(facts | {"digest": "of other bits"}))
    with pytest.raises(InputError, match="began with step 0 of .* use another --work"):
        train.run(config.load(run), run)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"model.num_heads": 2},
            "config.model.num_heads = 2; .* has 4. .*from_run.py:",
        ),
        ({"model.norm_epsilon": 1e-5}, "config.model.norm_epsilon = 1e-05; .* 1e-12"),
        (
            {"model.max_length": 16},
            "position_embed/embedding is .24, 16., and .*16, 16",
        ),
        ({"model.embed_norm": False}, "2 unexpected: encoder/embed_norm/bias"),
        ({"tokenizer.file": "vocab.txt"}, "expected None, as config.init_from"),
        ({"init_from": "/nowhere"}, "nowhere/tokenizer.json is not a file"),
    ],
)
def test_b85_what_differs_is_refused_by_name(
    overrides, message, imported, text, tmp_path
):
    with pytest.raises(InputError, match=message):
        train.run(make_config(imported, text, **overrides), tmp_path / "run")


def test_an_encoder_alone_is_not_trained_to_predict(text, tmp_path):
    import_hf.run(FIXTURES / "bert", tmp_path / "bare", without_head=True)
    with pytest.raises(InputError, match="config.model.head = False"):
        train.run(make_config(tmp_path / "bare", text), tmp_path / "run")
    c = make_config(tmp_path / "bare", text, **{"model.head": True})
    with pytest.raises(InputError, match="config.model.head = True; .* has False"):
        train.run(c, tmp_path / "run")


def test_an_exam_has_the_tokenizer_that_the_run_began_with(trained):
    """A run of `init_from` learns none: its rows are found again, its masks made."""
    report = mlm_jax.load(trained).evaluate(log=lambda line: None)["token@0.15"]
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    line = next(x for x in map(json.loads, lines[::-1]) if "eval/loss@0.15" in x)
    assert report["mask_hash"] == line["eval/mask_hash@0.15"]
    assert report["loss"] == pytest.approx(line["eval/loss@0.15"], rel=1e-5)
