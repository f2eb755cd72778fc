"""The command: from files to a result, what a workdir keeps, and what is refused."""

import ast
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from configs.finetune import base
from mlm_jax import checkpoint, trained
from mlm_jax.data import examples, task_files
from mlm_jax.errors import InputError
from mlm_jax.files import as_json
from mlm_jax.finetuning import problem, record, settings, table
from tests.finetuning import helpers

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return helpers.make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    records = helpers.classification(24)
    helpers.write(folder / "train.jsonl", records)
    helpers.write(folder / "test.jsonl", helpers.classification(12, seed=1))
    rows = [f"{record['text']}\t{record['label']}\n" for record in records]
    (folder / "train.tsv").write_text("".join(["text\tlabel\n", *rows]))
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def finetune(run, data, compiled):
    def call(workdir, *flags, code=0, config="base.py", **fields):
        fields = {
            "task.train": data / "train.jsonl",
            "task.validation": data / "train.jsonl",
            "seeds": "(0, 1)",
            "learning_rates": "(1e-2,)",
            "batch_size": 8,
            "num_epochs": 2,
        } | fields
        process = subprocess.run(
            [sys.executable, "-m", "mlm_jax.finetune"]
            + [f"--config={ROOT}/configs/finetune/{config}", f"--workdir={workdir}"]
            + [f"--from={run}", *flags]
            + [f"--config.{n}={v}" for n, v in fields.items() if v is not None],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            | {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
            | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert process.returncode == code, process.stderr
        assert "Traceback" not in process.stderr
        if code:
            assert process.stderr.startswith("error: ")
            assert process.stderr.count("\n") == 1
        return process.stdout + process.stderr

    return call


def test_a_result_from_files_to_table_and_the_rest_of_it_later(
    finetune, data, tmp_path
):
    """Finished trials are kept and skipped; labels and the best trial are there."""
    workdir = tmp_path / "runs"
    fields = {"task.test": data / "test.jsonl"}
    out = finetune(workdir, **fields)
    assert "2 labels: bad, good" in out and "all those of step 5" in out
    assert "lr0.01_seed1 epoch 2" in out
    result = json.loads((workdir / "result.json").read_text())
    (row,) = result["rows"]
    assert row["seeds"] == [0, 1] and len(row["test"]["accuracy"]["values"]) == 2
    assert (workdir / "result.md").read_text() in out
    assert json.loads((workdir / "task.json").read_text())["labels"] == ["bad", "good"]
    step, state = checkpoint.restore_latest(workdir)
    assert state["params"]["output"]["kernel"].shape == (16, 2)
    kept = (workdir / "trials/lr0.01_seed0.json").read_bytes()

    # A trial that is gone is made again, the same; the others are not touched.
    (workdir / "trials/lr0.01_seed1.json").rename(tmp_path / "before.json")
    out = finetune(workdir, **fields, **{"seeds": "(0, 1, 2)"})
    assert "seed0 epoch" not in out and "seed2 epoch 2" in out
    assert (workdir / "trials/lr0.01_seed0.json").read_bytes() == kept
    facts = [
        json.loads(path.read_text()) | {"seconds": 0}
        for path in (tmp_path / "before.json", workdir / "trials/lr0.01_seed1.json")
    ]
    assert facts[0] == facts[1]

    # Another question needs another directory.
    out = finetune(workdir, **fields, **{"dropout": 0.2}, code=2)
    assert "dropout: 0.1 -> 0.2" in out


REFUSED = [
    ({"task.label": "lable"}, "train.jsonl line 1: no column 'lable'.*'label'"),
    ({"task.train": "none.jsonl"}, "config.task.train=none.jsonl cannot be read"),
    ({"task.train": "x.csv"}, r"none of \*.jsonl, \*.tsv and tfds:"),
    ({"task.train": "tfds:glue/sst2"}, "not of the form tfds:"),
    ({"task.train": None}, "config.task.train is missing"),
    ({"task.kind": "tagging"}, "24|label"),
    ({"task.kind": "regresion"}, "Did you mean regression"),
    ({"task.kind": "regression"}, "line 1: label = '.*'; expected a finite number"),
    ({"task.kind": "spans"}, "config.task.pair is missing"),
    ({"task.metric": "acuracy"}, "Did you mean accuracy"),
    ({"task.metric": "f1"}, "config.task.positive is missing"),
    ({"task.positive": "goood"}, "'goood' is no label; did you mean 'good'"),
    ({"seeds": "()"}, "config.seeds = "),
    ({"learning_rates": "(0.0,)"}, "config.learning_rates = "),
    ({"task.row_length": 4}, "config.task.row_length = 4"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=[str(f) for f, _ in REFUSED])
def test_a_wrong_config_is_refused_in_a_line(data, tmp_path, fields, message):
    """What the command prints for an InputError is `test_wrong_input_exits_2`."""
    c = base.get_config().copy_and_resolve_references()
    values = {"task.train": str(data / "train.jsonl")}
    values |= {"task.validation": str(data / "train.jsonl")} | fields
    with c.unlocked():
        for name, value in values.items():
            *section, field = name.split(".")
            value = ast.literal_eval(value) if str(value).startswith("(") else value
            (c[section[0]] if section else c)[field] = value
    with pytest.raises(InputError, match=message):
        settings.check(c)
        problem.make(c, helpers.make_tokenizer(), 32)


BAD_FILES = {
    "empty.jsonl": ("", "has no examples"),
    "text.jsonl": ("hello\n", "line 1 is not JSON"),
    "list.jsonl": ("[1]\n", "line 1 is no JSON object"),
    "number.jsonl": (
        '{"text": 3, "label": "x"}\n',
        "line 1: text = 3; expected a text",
    ),
    "null.jsonl": ('{"text": "a", "label": null}\n', "line 1: label None"),
    "one.jsonl": ('{"text": "a", "label": "x"}\n', "the label 'x' only"),
    "columns.tsv": ("text\tlabel\na\tx\tb\n", "line 2 has 3 columns"),
    "header.tsv": ("text\tlabel\n", "has no examples"),
    "name.tsv": ("txt\tlabel\na\tx\n", "line 2: no column 'text'.*'txt'"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_line(tmp_path, name):
    text, message = BAD_FILES[name]
    path = tmp_path / name
    path.write_text(text)
    c = base.get_config().copy_and_resolve_references()
    c.task.train = c.task.validation = str(path)
    with pytest.raises(InputError, match=message):
        problem.make(c, helpers.make_tokenizer(), 32)


def test_wrong_input_exits_2(finetune, data, tmp_path):
    path = tmp_path / "validation.jsonl"
    helpers.write(path, [{"text": "a house", "label": "god"}])
    out = finetune(tmp_path / "w", code=2, **{"task.validation": path})
    assert "validation.jsonl line 1: label 'god'" in out and "'good'" in out
    assert "--from" in finetune(tmp_path / "w", "--from=", code=2)
    out = finetune(tmp_path / "w", f"--from={tmp_path}", code=2)
    assert "holds no run" in out


def test_b82_labels_are_stored_by_name_and_order_does_not_matter(data, tmp_path):
    """Examples in another order, with the names given otherwise: the same ids; and the
    stored order, whatever it is, is the one that counts."""
    lines = (data / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shuffled = random.Random(0).sample(records, len(records))
    folders = [tmp_path / name for name in ("a", "b")]
    found = []
    for folder, some in zip(folders, (records, shuffled), strict=True):
        folder.mkdir()
        c = helpers.make_config(folder, some)
        found.append(problem.make(c, helpers.make_tokenizer(), 32))
    assert found[0].labels == found[1].labels == ("bad", "good")

    start = trained.load(helpers.make_run(tmp_path / "run"))
    record.begin(folders[0], c, found[0], start)
    stored = json.loads((folders[0] / "task.json").read_text())
    stored["labels"] = ["good", "bad"]
    (folders[0] / "task.json").write_text(json.dumps(stored))
    assert record.labels(folders[0]) == ("good", "bad")
    again = problem.make(c, helpers.make_tokenizer(), 32, record.labels(folders[0]))
    flipped = 1 - found[1].rows["train"].columns["target"]
    assert again.rows["train"].columns["target"].tolist() == flipped.tolist()
    with pytest.raises(InputError, match=r"\['bad'\] are new, \['worse'\] are missing"):
        problem.make(c, helpers.make_tokenizer(), 32, ("good", "worse"))


def test_tsv_is_read_as_jsonl_is(data):
    columns = examples.Columns("text", None, "label")
    found = [
        examples.read(
            "classification",
            task_files.records(str(data / name), "config.task.train", None),
            columns,
        )
        for name in ("train.jsonl", "train.tsv")
    ]
    assert [e[1:] for e in found[0]] == [e[1:] for e in found[1]]


def facts(rate, seed, accuracy, state="finished"):
    scores = None if state == "diverged" else {"accuracy": accuracy, "loss": 1.0}
    return {
        "learning_rate": rate,
        "seed": seed,
        "state": state,
        "best_epoch": 0 if scores is None else 2,
        "validation": scores,
        "test": scores,
        "seconds": 1.0,
        "history": [],
    }


def test_the_table_has_medians_and_extremes_by_hand():
    trials = [facts(1e-3, s, a) for s, a in enumerate((0.5, 0.9, 0.6))]
    trials += [facts(1e-2, s, a) for s, a in enumerate((0.7, 0.99, 0.5))]
    result = table.summarise(trials, "accuracy")
    assert result == table.summarise(trials[::-1], "accuracy")
    assert result["best"] == 1e-2
    spreads = [row["test"]["accuracy"] for row in result["rows"]]
    assert [s["median"] for s in spreads] == [0.6, 0.7]
    assert [(s["low"], s["high"]) for s in spreads] == [(0.5, 0.9), (0.5, 0.99)]
    text = table.markdown(result, "# t")
    assert "| **0.01** | **3** | **0.7000 [0.5000, 0.9900]** |" in text


def test_a_trial_that_diverged_counts_as_the_lowest():
    trials = [facts(1e-3, s, 0.6) for s in range(3)]
    trials += [facts(1e-2, 0, 0.9), facts(1e-2, 1, 0, "diverged")]
    trials += [facts(1e-2, 2, 0, "diverged")]
    result = table.summarise(trials, "accuracy")
    assert result["best"] == 1e-3 and result["rows"][1]["diverged"] == 2
    assert "3, 2 diverged" in table.markdown(result, "# t")
    json.loads(as_json(result))  # no NaN and no Infinity
