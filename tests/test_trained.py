"""A trained run in Python and by its commands: one says what the other does."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import mlm_jax
from mlm_jax import checkpoint
from mlm_jax.errors import CheckpointError, InputError
from tests.runs import ROOT, lines, train

TEXTS = ["She was very glad to see him.", "", "Catherine", "He had a cold."]


@pytest.fixture(scope="module")
def trained(whole):
    return mlm_jax.load(whole)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "sentences.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def run(command, *arguments, code=0, text=None):
    """Returns (stdout, stderr) of a command as users run it."""
    result = subprocess.run(
        [sys.executable, "-m", f"mlm_jax.{command}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        input=text,
        timeout=600,
    )
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def test_importing_the_package_is_light():
    code = "import mlm_jax, sys; print({'jax', 'numpy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert found.stdout == b"set()\n", found.stderr


def test_a_run_is_what_its_checkpoint_holds(trained, whole):
    step, state = checkpoint.restore_latest(whole)
    assert trained.step == step == 8
    assert checkpoint.digest(trained.params) == checkpoint.digest(state["params"])
    assert trained.tokenizer.vocab_size == 512
    earlier = mlm_jax.load(whole, step=4)
    assert earlier.step == 4
    assert checkpoint.digest(earlier.params) != checkpoint.digest(trained.params)


def test_what_is_not_there_is_refused(whole, tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        mlm_jax.load(tmp_path)
    with pytest.raises(CheckpointError, match="of step 5; there are: 4, 8"):
        mlm_jax.load(whole, step=5)


def test_fill_mask_of_one_text_and_of_several(trained):
    one = trained.fill_mask("The [MASK] was [MASK].", top=3)
    assert [len(choices) for choices in one] == [3, 3]
    several = trained.fill_mask(["A [MASK].", "The [MASK] was [MASK]."], top=3)
    assert [len(filled) for filled in several] == [1, 2]
    for a, b in zip(one, several[1], strict=True):
        assert [c.text for c in a] == [c.text for c in b]


def test_embeddings_are_the_states_pooled(trained):
    """Against the encoder's states of one row without padding, in float64."""
    (encoded,) = trained.tokenizer.encode(TEXTS[:1])
    tokens_1xT = trained.reader.frame(encoded.tokens)[None]
    x_TxD = trained.model.apply(
        {"params": trained.params},
        tokens_1xT,
        np.ones_like(tokens_1xT),
        np.arange(tokens_1xT.size, dtype=np.int32)[None],
        method=lambda model, *row: model.encoder(*row),
    )[0]
    x_TxD = np.asarray(x_TxD, np.float64)
    expected = {"mean": x_TxD.mean(0), "cls": x_TxD[0]}
    for pooling, expected_D in expected.items():
        vectors_NxD = trained.embed(TEXTS, pooling=pooling)
        assert vectors_NxD.dtype == np.float32 and np.isfinite(vectors_NxD).all()
        np.testing.assert_allclose(vectors_NxD[0], expected_D, rtol=1e-4, atol=1e-5)
        vector_D = trained.embed(TEXTS[0], pooling=pooling)
        np.testing.assert_allclose(vector_D, expected_D, rtol=1e-4, atol=1e-5)


def test_score_writes_what_python_says(trained, whole, sentences):
    out, err = run("score", f"--workdir={whole}", sentences, "--per_token")
    found = [json.loads(line) for line in out.splitlines()]
    expected = trained.pseudo_log_likelihood(TEXTS)
    assert [line["text"] for line in found] == TEXTS
    for line, likelihood in zip(found, expected, strict=True):
        assert line["pll"] == pytest.approx(likelihood.pll, abs=1e-4)
        assert line["num_tokens"] == len(line["tokens"]) == len(line["log_p"])
        assert sum(line["log_p"]) == pytest.approx(line["pll"])
    total = sum(line["pll"] for line in found)
    count = sum(line["num_tokens"] for line in found)
    ppl = float(err.split("pseudo-perplexity ")[1].split()[0].replace(",", ""))
    assert ppl == pytest.approx(math.exp(-total / count), rel=1e-4)


def test_score_reads_the_standard_input(trained, whole):
    out, _ = run(
        *("score", f"--workdir={whole}", "--pll=original"), text=TEXTS[0] + "\n"
    )
    expected = trained.pseudo_log_likelihood(TEXTS[0], kind="original").pll
    assert json.loads(out)["pll"] == pytest.approx(expected, abs=1e-4)


def test_embed_writes_both_kinds_of_file(trained, whole, sentences, tmp_path):
    expected_NxD = trained.embed(TEXTS)
    path = tmp_path / "vectors.npy"
    run("embed", f"--workdir={whole}", sentences, f"--output={path}")
    np.testing.assert_allclose(np.load(path), expected_NxD, rtol=1e-4, atol=1e-5)

    import pyarrow.parquet as pq

    from mlm_jax.tasks import texts

    texts.write_vectors(tmp_path / "vectors.parquet", TEXTS, expected_NxD)
    table = pq.read_table(tmp_path / "vectors.parquet")
    assert table["text"].to_pylist() == TEXTS
    np.testing.assert_array_equal(table["vector"].to_pylist(), expected_NxD)


def test_judge_pairs_goes_on_where_its_file_ends(trained, whole, tmp_path):
    path = tmp_path / "judged.jsonl"
    command = "judge_pairs", f"--workdir={whole}", "bundled:agreement"
    out, _ = run(*command, f"--output={path}")
    by_paradigm, overall = trained.minimal_pairs("bundled:agreement")
    # A margin of rounding may be on the other side of the tie.
    share = float(out.splitlines()[-1].split()[1].removesuffix("%")) / 100
    assert share == pytest.approx(overall.share, abs=0.002)
    assert len(out.splitlines()) == 1 + len(by_paradigm) + 1

    written = path.read_text()
    path.write_text(written[: len(written) // 2])  # in the middle of a line
    again, err = run(*command, f"--output={path}")
    assert (
        again == out
        and f"has {written[: len(written) // 2].count(chr(10)) - 1} of" in err
    )
    assert path.read_text() == written
    _, err = run(*command, f"--output={path}", "--pll=original", code=2)
    assert "judged otherwise: pll is not the same" in err


def test_evaluate_prints_a_matrix_and_writes_all(trained, whole, tmp_path):
    path = tmp_path / "exam.json"
    out, _ = run(
        *("evaluate", whole, whole, "--rates=0.15,0.5", "--strategies=token,word"),
        *(f"--output={path}", "--details"),
    )
    assert out.count("token@0.15") == 3 and "later piece" in out
    runs = json.loads(path.read_text())["runs"]
    assert len(runs) == 2 and runs[0] == runs[1]
    exams = runs[0]["exams"]
    assert list(exams) == ["token@0.15", "token@0.5", "word@0.15", "word@0.5"]
    logged = [line for line in lines(whole) if "eval/loss@0.15" in line][-1]
    assert exams["token@0.15"]["mask_hash"] == logged["eval/mask_hash@0.15"]
    assert exams["token@0.15"]["loss"] == pytest.approx(
        logged["eval/loss@0.15"], rel=1e-5
    )
    report = trained.evaluate(rates=(0.5,), strategies=("word",), log=lambda text: None)
    assert report["word@0.5"]["loss"] == pytest.approx(exams["word@0.5"]["loss"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("evaluate",), "no run to evaluate"),
        (("evaluate", "nothing"), "nothing holds no run"),
        (("evaluate", "nothing", "--rates=2"), "rates (2.0,); expected"),
        (("judge_pairs", "--workdir=nothing"), "no minimal pairs, such as"),
        (("embed", "--workdir=x", "--output=a.csv"), "a.csv; expected a name in .npy"),
        (("score", "--workdir=nothing", "absent.txt"), "absent.txt cannot be read"),
    ],
)
def test_wrong_input_is_one_line(arguments, message):
    _, err = run(*arguments, code=2)
    assert message in err and "Traceback" not in err


def test_training_judges_pairs_at_each_evaluation(shared, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pair = '{"sentence_good": "She was glad.", "sentence_bad": "Glad she was."}\n'
    pairs.write_text(pair * 3)
    workdir = tmp_path / "run"
    fields = {"eval.minimal_pairs": pairs, "optim.num_steps": 4}
    output = train(workdir, shared, **fields)
    logged = [
        line["eval/minimal_pairs"] for line in lines(workdir) if "eval" in str(line)
    ]
    assert len(logged) == 2 and set(logged) <= {0.0, 1.0}
    assert "minimal pairs at step 4" in output
    _, overall = mlm_jax.load(workdir).minimal_pairs(pairs)
    assert overall.pairs == 3 and logged[-1] == overall.share
