"""Each kind of task learns what can be learned, from data to scores."""

import pytest

from mlm_jax import trained
from mlm_jax.finetuning.trials import Trial
from tests.finetuning import helpers
from tests.finetuning.helpers import GOOD, make_config, make_trainer, sentences, train


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return trained.load(helpers.make_run(tmp_path_factory.mktemp("run")))


def learned(start, folder, records, **changes):
    """Returns the scores of the best epoch on the data it was trained on."""
    c = make_config(folder, records, test=records, **changes)
    trainer, _ = make_trainer(c, start)
    (outcome,) = train(trainer, Trial(c.learning_rates[0], 0))
    first, last = outcome.facts["history"][0], outcome.facts["history"][-1]
    assert last["train_loss"] < first["train_loss"]
    assert outcome.facts["test"] == outcome.facts["validation"]  # the same examples
    return outcome.facts["test"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_gets_its_label(start, tmp_path, pooling):
    records = helpers.classification()
    scores = learned(start, tmp_path, records, pooling=pooling)
    assert scores["accuracy"] > 0.9


def test_a_pair_gets_its_label(start, tmp_path):
    """It is in the second text of two thirds of the pairs, else in the first."""
    records = [
        {"a": text, "b": "the house", "label": record["label"]}
        if n % 3
        else {"a": "the house", "b": text, "label": record["label"]}
        for n, record in enumerate(helpers.classification())
        for text in [record["text"]]
    ]
    changes = {"task.text": "a", "task.pair": "b", "num_epochs": 20, "patience": 20}
    assert learned(start, tmp_path, records, **changes)["accuracy"] == 1


def test_a_text_gets_its_number(start, tmp_path):
    """Far from 0 and large: the head learns deviations from the mean."""
    records = [
        {"text": " ".join(words), "label": 1003.0 if good else 1001}
        for words, good in sentences(32)
    ]
    changes = {"task.kind": "regression", "num_epochs": 30, "patience": 30}
    scores = learned(start, tmp_path, records, **changes)
    assert scores["pearson"] > 0.95
    assert scores["squared_error"] < 0.1


def test_each_word_gets_its_tag(start, tmp_path):
    records = [
        {"words": words, "tags": ["B-good" if w in GOOD else "O" for w in words]}
        for words, _ in sentences(32)
    ]
    changes = {"task.kind": "tagging", "task.text": "words", "task.label": "tags"}
    scores = learned(
        start, tmp_path, records, **changes, **{"task.metric": "entity_f1"}
    )
    assert scores["accuracy"] == scores["entity_f1"] == 1


def test_a_question_gets_its_answer_or_none(start, tmp_path):
    records = []
    for words, good in sentences(32):
        (word,) = [w for w in words if w not in helpers.REST]
        context = " ".join(words)
        answers = {"text": [word], "answer_start": [context.index(word)]}
        none = {"text": [], "answer_start": []}
        records.append(
            {"q": "a friend", "c": context, "answers": answers if good else none}
        )
    changes = {"task.kind": "spans", "task.text": "q", "task.pair": "c"}
    changes |= {"task.label": "answers", "num_epochs": 25, "patience": 25}
    scores = learned(start, tmp_path, records, **changes)
    assert scores["exact"] == scores["f1"] == 1
