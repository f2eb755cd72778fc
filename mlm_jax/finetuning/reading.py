"""Answers of the model -> predictions, one for each example. Imports no jax."""

import numpy as np

from mlm_jax.finetuning.problem import Problem


def predictions(problem: Problem, split: str, answers: np.ndarray) -> list:
    """Returns the prediction of every example of a split.

    A label's name, a number, a list of tags, or the text of an answer, "" for none.
    `answers` are those of all rows, as `step.make_predict` gives them.
    """
    return _READERS[problem.kind](problem, split, answers)


def _names(problem, split, id_N):
    return [problem.labels[id_] for id_ in id_N]


def _numbers(problem, split, outputs_Nx1):
    scale = problem.scale
    standard = outputs_Nx1[:, 0].astype(np.float64)
    return (standard * scale["deviation"] + scale["mean"]).tolist()


def _tags(problem, split, id_NxL):
    rows = problem.rows[split]
    found = [[""] * len(example.texts) for example in problem.examples[split]]
    for n, position in zip(*np.nonzero(rows.columns["weight"]), strict=True):
        word = rows.places[n, position, 0]
        found[rows.columns["example"][n]][word] = problem.labels[id_NxL[n, position]]
    return found


def _answers(problem, split, outputs_NxLx2):
    """The best span of any window, unless the least that a window gives to no answer,
    which is what [CLS] stands for, is more (Devlin et al. 2019)."""
    rows = problem.rows[split]
    best: dict[int, tuple[float, str]] = {}
    none: dict[int, float] = {}
    for n, number in enumerate(rows.columns["example"].tolist()):
        start_L, end_L = outputs_NxLx2[n].T.astype(np.float64)
        context = problem.examples[split][number].texts[1]
        nothing = start_L[0] + end_L[0]
        none[number] = min(nothing, none.get(number, np.inf))
        span = best_span(start_L, end_L, rows.places[n, :, 0] >= 0, problem.max_answer)
        if span is None:
            continue
        score, first, last = span
        text = context[rows.places[n, first, 0] : rows.places[n, last, 1]].strip()
        if number not in best or score > best[number][0]:
            best[number] = score, text
    return [
        best[number][1] if number in best and best[number][0] > none[number] else ""
        for number in range(len(problem.examples[split]))
    ]


def best_span(start_L, end_L, is_context_L, max_answer):
    """Returns (score, first, last) of the span of at most `max_answer` tokens of the
    context with the largest start + end; None if there is no context."""
    places = np.flatnonzero(is_context_L)
    if not len(places):
        return None
    low, high = places[0], places[-1] + 1
    score_TxT = start_L[low:high, None] + end_L[None, low:high]
    is_span_TxT = np.triu(np.ones(score_TxT.shape, bool))
    is_span_TxT &= ~np.triu(np.ones(score_TxT.shape, bool), max_answer)
    score_TxT = np.where(is_span_TxT, score_TxT, -np.inf)
    first, last = np.unravel_index(score_TxT.argmax(), score_TxT.shape)
    return float(score_TxT[first, last]), int(low + first), int(low + last)


_READERS = {
    "classification": _names,
    "regression": _numbers,
    "tagging": _tags,
    "spans": _answers,
}
