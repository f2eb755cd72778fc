"""Predictions and targets -> scores, by name; more is better in each of METRICS.

A score that is not defined (a correlation with constant predictions) is NaN.
"""

import collections
import math
import re
import string

import numpy as np
import scipy.stats
import sklearn.metrics
from seqeval.metrics import f1_score as entity_f1_score

# By kind of task; the first is what validation goes by if nothing is said.
METRICS = {
    "classification": ("accuracy", "macro_f1", "matthews", "f1"),
    "regression": ("spearman", "pearson"),
    "tagging": ("accuracy", "macro_f1", "entity_f1"),
    "spans": ("f1", "exact"),
}
ENTITY_TAG = re.compile(r"O|[BIES]-.+")
ARTICLES = re.compile(r"\b(a|an|the)\b")


def classification(targets, predictions, positive=None):
    """Returns the scores of labels by name; `f1` only if one is `positive`."""
    scores = {
        "accuracy": sklearn.metrics.accuracy_score(targets, predictions),
        "macro_f1": _macro_f1(targets, predictions),
        "matthews": sklearn.metrics.matthews_corrcoef(targets, predictions),
    }
    if positive is not None:
        scores["f1"] = sklearn.metrics.f1_score(
            [target == positive for target in targets],
            [prediction == positive for prediction in predictions],
            zero_division=0,
        )
    return _floats(scores)


def regression(targets, predictions):
    """Returns correlations, and the mean squared error, of which less is better."""
    targets = np.asarray(targets, np.float64)
    predictions = np.asarray(predictions, np.float64)
    scores = {"spearman": math.nan, "pearson": math.nan}
    if len(targets) > 1 and np.ptp(targets) > 0 and np.ptp(predictions) > 0:
        scores["spearman"] = scipy.stats.spearmanr(targets, predictions).statistic
        scores["pearson"] = scipy.stats.pearsonr(targets, predictions).statistic
    scores["squared_error"] = np.mean((targets - predictions) ** 2)
    return _floats(scores)


def tagging(targets, predictions):
    """Returns the scores of tags, a list for each sentence; `entity_f1`, of whole
    entities, only if all are B-…, I-…, E-…, S-… or O."""
    flat_targets = [tag for sentence in targets for tag in sentence]
    flat_predictions = [tag for sentence in predictions for tag in sentence]
    scores = {
        "accuracy": sklearn.metrics.accuracy_score(flat_targets, flat_predictions),
        "macro_f1": _macro_f1(flat_targets, flat_predictions),
    }
    if are_entities(flat_targets + flat_predictions):
        lists = [list(map(list, tags)) for tags in (targets, predictions)]
        scores["entity_f1"] = entity_f1_score(*lists, zero_division=0)
    return _floats(scores)


def spans(targets, predictions):
    """Returns SQuAD's scores: of each prediction the best over the question's answers.

    `targets` are lists of texts, empty where there is no answer; `predictions` texts,
    "" for none.
    """
    exact, f1 = [], []
    for texts, prediction in zip(targets, predictions, strict=True):
        answers = [text for text in texts if normalise(text)] or [""]
        exact.append(max(normalise(a) == normalise(prediction) for a in answers))
        f1.append(max(overlap(answer, prediction) for answer in answers))
    return _floats({"f1": np.mean(f1), "exact": np.mean(exact)})


def normalise(text):
    """Lower case without punctuation, articles and white space more than one: as the
    evaluation script of SQuAD compares (Rajpurkar et al. 2016)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", text).split())


def overlap(answer, prediction):
    """Returns F1 of the words of two texts; 1 if neither has any, 0 if one has none."""
    a, p = normalise(answer).split(), normalise(prediction).split()
    if not a or not p:
        return float(a == p)
    common = sum((collections.Counter(a) & collections.Counter(p)).values())
    return 2 * common / (len(a) + len(p))


def are_entities(tags):
    return all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def _macro_f1(targets, predictions):
    return sklearn.metrics.f1_score(
        targets, predictions, average="macro", zero_division=0
    )


def _floats(scores):
    return {name: float(score) for name, score in scores.items()}
