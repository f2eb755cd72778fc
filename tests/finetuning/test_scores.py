"""Scores against values worked out by hand."""

import math

import pytest

from mlm_jax.finetuning import scores


def test_classification_by_hand():
    """Of 4 cats 3 are found with 1 dog taken for one: precision and recall 3/4; of 2
    dogs 1 is found, with 1 cat: 1/2. Matthews: (3 - 1) / sqrt(4 x 4 x 2 x 2)."""
    targets = ["cat"] * 4 + ["dog"] * 2
    predictions = ["cat", "cat", "cat", "dog", "cat", "dog"]
    found = scores.classification(targets, predictions, positive="dog")
    assert found == pytest.approx(
        {"accuracy": 4 / 6, "macro_f1": (3 / 4 + 1 / 2) / 2, "matthews": 1 / 4}
        | {"f1": 1 / 2}
    )
    swapped = scores.classification(targets, predictions, positive="cat")
    assert swapped["f1"] == pytest.approx(3 / 4)
    assert "f1" not in scores.classification(targets, predictions)


def test_matthews_is_0_for_one_answer_to_all():
    found = scores.classification(["a", "b", "b"], ["b", "b", "b"], positive="a")
    assert found["matthews"] == 0 and found["f1"] == 0


def test_regression_by_hand():
    """x = 1, 2, 3 and y = 1, 4, 2: covariance 1, deviations 2 and 14/3 in squares."""
    found = scores.regression([1, 2, 3], [1, 4, 2])
    assert found["pearson"] == pytest.approx(1 / math.sqrt(2 * 14 / 3))
    assert found["spearman"] == pytest.approx(0.5)  # ranks 1, 3, 2
    assert found["squared_error"] == pytest.approx((0 + 4 + 1) / 3)


@pytest.mark.parametrize("predictions", [[2.0, 2.0, 2.0], [2.0]])
def test_b84_a_correlation_with_a_constant_is_not_a_number(predictions):
    found = scores.regression([1.0, 2.0, 3.0][: len(predictions)], predictions)
    assert math.isnan(found["pearson"]) and math.isnan(found["spearman"])


def test_entities_count_whole():
    """Three entities, two found whole, one cut short: 2 of 3 and 2 of 3."""
    targets = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "I-PER"]]
    predictions = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O"]]
    found = scores.tagging(targets, predictions)
    assert found["entity_f1"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(5 / 6)


def test_tags_that_are_no_entities_have_no_entity_score():
    assert "entity_f1" not in scores.tagging([["nn", "vb"]], [["nn", "nn"]])


def test_no_entity_at_all_is_0_without_a_warning():
    assert scores.tagging([["O", "O"]], [["O", "O"]])["entity_f1"] == 0


def test_spans_by_hand():
    """Articles, case and points do not count; of several answers the best one does."""
    targets = [["The Cat.", "dog"], ["in the old house"], [], []]
    predictions = ["cat", "old house tonight", "", "a mouse"]
    found = scores.spans(targets, predictions)
    # The second: 2 words of 3 and 2 of 3; the last two: no answer, right and wrong.
    assert found["exact"] == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert found["f1"] == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
