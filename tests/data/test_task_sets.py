"""GLUE's nine tasks and SQuAD through TFDS, their own code but for the download."""

import pytest
import tensorflow_datasets as tfds

from mlm_jax import command
from mlm_jax.data import data_sets
from mlm_jax.errors import InputError
from mlm_jax.finetuning import problem, settings
from tests.finetuning import helpers

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
TEXTS = ("the house was very old", "a friend of hers", "was seen by the friend")


def prepare(monkeypatch, folder, name, example, splits):
    """Writes a data set by its builder, whose features and labels are TFDS's own."""
    builder = tfds.builder(name, data_dir=folder)

    def generate(self, manager):
        del self, manager
        return {
            split: [(n, example(builder, n)) for n in range(12)] for split in splits
        }

    monkeypatch.setattr(type(builder), "_split_generators", generate)
    builder.download_and_prepare(file_format="array_record")
    return builder


def glue_example(builder, n):
    values = {}
    for name, feature in builder.info.features.items():
        if isinstance(feature, tfds.features.Text):
            values[name] = TEXTS[n % 3]
        elif isinstance(feature, tfds.features.ClassLabel):
            values[name] = n % feature.num_classes
        else:
            values[name] = n if name == "idx" else n / 4
    return values


@pytest.mark.parametrize("task", GLUE)
def test_glue(monkeypatch, tmp_path, task):
    """The nine configs name columns that are there, and labels come by name."""
    splits = ("train", "validation")
    if task == "mnli":
        splits = ("train", "validation_matched", "validation_mismatched")
    builder = prepare(monkeypatch, tmp_path, f"glue/{task}", glue_example, splits)
    c = command.load_config(f"configs/finetune/glue.py:{task}")
    c.task.data_dir = str(tmp_path)
    settings.check(c)
    found = problem.make(c, helpers.make_tokenizer(), helpers.ROW_LENGTH)
    names = getattr(builder.info.features["label"], "names", ())
    assert found.labels == tuple(sorted(names))
    examples = found.examples["train"]
    assert len(examples) == 12
    assert len(examples[0].texts) == (1 if c.task.pair is None else 2)
    if names:  # the n-th record has the class n modulo their number, in any order
        wanted = [(TEXTS[n % 3], names[n % len(names)]) for n in range(12)]
        assert sorted((e.texts[0], e.label) for e in examples) == sorted(wanted)
    if task == "stsb":
        assert sorted(e.label for e in examples) == [n / 4 for n in range(12)]
    predictions = [example.label for example in found.examples["validation"]]
    scores = problem.score(found, "validation", predictions)
    assert scores[found.metric] == pytest.approx(1)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_squad(monkeypatch, tmp_path, version):
    def example(builder, n):
        answers = [{"text": "house", "answer_start": 4}]
        values = {"id": str(n), "title": "t", "question": TEXTS[1], "context": TEXTS[0]}
        if version == "v1.1":
            return values | {"answers": answers}
        return values | {
            "answers": answers if n % 2 else [],
            "plausible_answers": [],
            "is_impossible": not n % 2,
        }

    name = f"squad/{version}"
    prepare(monkeypatch, tmp_path, name, example, ("train", "validation"))
    c = command.load_config(f"configs/finetune/squad.py:{version}")
    c.task.data_dir = str(tmp_path)
    settings.check(c)
    found = problem.make(c, helpers.make_tokenizer(), helpers.ROW_LENGTH)
    has_answer = [bool(example.label) for example in found.examples["train"]]
    assert sum(has_answer) == (12 if version == "v1.1" else 6)
    perfect = ["house" if e.label else "" for e in found.examples["validation"]]
    assert problem.score(found, "validation", perfect)["exact"] == 1


def test_b82_a_class_that_is_not_told_is_refused(monkeypatch, tmp_path):
    """GLUE's test labels are -1: no name, and never the last one."""

    def example(builder, n):
        return {"sentence": TEXTS[0], "label": -1, "idx": n}

    prepare(monkeypatch, tmp_path, "glue/sst2", example, ("test",))
    _, record = next(data_sets.examples("glue/sst2", "test", str(tmp_path)))
    assert record["label"] is None
    with pytest.raises(InputError, match="has no split trian, only test"):
        next(data_sets.examples("glue/sst2", "trian", str(tmp_path)))


@pytest.mark.parametrize("config", ["glue.py:sst3", "squad.py:v3"])
def test_an_unknown_task_is_refused(config):
    with pytest.raises(InputError, match="expected "):
        command.load_config(f"configs/finetune/{config}")
