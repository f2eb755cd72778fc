"""What a model answers in an exam, prediction by prediction, and what that adds up to.

Every number is a sum over predictions over their count, in double precision, so that
neither batches nor padding show.
"""

import math
from typing import NamedTuple

import numpy as np

from mlm_jax import parallel
from mlm_jax.step import make_predict_fn
from mlm_jax.tasks.reader import fetched

BINS = 15  # of confidence, of equal width, as Guo et al. 2017 have them
PARTS = ("whole word", "first piece", "later piece")
SLOTS = 16  # slots are a multiple of it, so that exams of near rates share a program


class Answers(NamedTuple):
    """One entry a prediction."""

    losses_N: np.ndarray  # float64, nats
    ranks_N: np.ndarray  # of the target among the classes, from 0
    top_losses_N: np.ndarray  # float64, -log p of the most probable class
    targets_N: np.ndarray
    position_N: np.ndarray  # in the segment; [CLS] is 0
    part_N: np.ndarray  # index into PARTS


def make_predict(model, num_classes, mesh):
    """Returns the compiled `predict(params, batch)`, as `answer` takes it."""
    is_partitioned = "tensor" in mesh.shape
    predict = make_predict_fn(model, num_classes, is_partitioned=is_partitioned)
    return parallel.compile_by_row(predict, mesh)


def answer(predict, params, rows, *, is_special_V, batch_size, tick=None):
    """Returns the `Answers` to all predictions of `rows`, which are as
    `frozen_masks.Masks` has them.

    `batch_size` is a multiple of the devices' number; `tick(n)` is told of every n rows
    more that are done.
    """
    names = "inputs", "segment", "position", "predict", "targets", "weights"
    num_rows, num_slots = rows["predict"].shape
    more_slots = -num_slots % SLOTS
    found = []

    def results():
        for first in range(0, num_rows, batch_size):
            batch = {name: rows[name][first : first + batch_size] for name in names}
            missing = batch_size - len(batch["inputs"])
            yield predict(
                params,
                {
                    name: np.pad(
                        x, [(0, missing), (0, more_slots if name in names[3:] else 0)]
                    )
                    for name, x in batch.items()
                },
            )

    for predictions in fetched(results()):
        found.append(predictions)
        if tick is not None:
            tick(min(batch_size, num_rows - (len(found) - 1) * batch_size))
    is_used_NxM = rows["weights"] > 0
    by_slot = [
        np.concatenate(x)[:num_rows, :num_slots][is_used_NxM]
        for x in zip(*found, strict=True)
    ]
    losses_N, ranks_N, top_losses_N = by_slot
    row_N, _ = np.nonzero(is_used_NxM)
    place_N = rows["predict"][is_used_NxM]
    return Answers(
        losses_N.astype(np.float64),
        ranks_N,
        top_losses_N.astype(np.float64),
        rows["targets"][is_used_NxM],
        rows["position"][row_N, place_N],
        parts(rows, is_special_V)[row_N, place_N],
    )


def parts(rows, is_special_V):
    """Returns int[N, L]: for each ordinary token, the index into PARTS of the part of
    its word that it is. Words are as whole-word masking has them."""
    is_token_NxL = (rows["segment"] > 0) & ~is_special_V[rows["tokens"]]
    follows_NxL = np.pad(is_token_NxL, [(0, 0), (1, 0)])[:, :-1]
    is_later_NxL = is_token_NxL & follows_NxL & ~rows["word_start"]
    goes_on_NxL = np.pad(is_later_NxL, [(0, 0), (0, 1)])[:, 1:]
    return np.where(is_later_NxL, 2, np.where(goes_on_NxL, 1, 0))


def report(answers, token_counts_V, byte_lengths_V):
    """Returns what the answers add up to, ready to be JSON.

    `token_counts_V` is how often each token occurs in the training rows. Bits per byte
    are the bits lost over the UTF-8 bytes of the hidden text, white space apart: those
    of models with other tokenizers may be compared.
    """
    num = len(answers.losses_N)
    counts_N = token_counts_V[answers.targets_N]
    num_bytes = int(byte_lengths_V[answers.targets_N].sum())
    total = float(answers.losses_N.sum())
    return {
        "num_predictions": num,
        "loss": total / num,
        "perplexity": math.exp(min(total / num, 700)),
        "accuracy": float((answers.ranks_N == 0).mean()),
        "top5": float((answers.ranks_N < 5).mean()),
        "num_bytes": num_bytes,
        "bits_per_byte": total / math.log(2) / num_bytes,
        "calibration": calibration(answers),
        "by_frequency": _grouped(answers, *_powers(counts_N, 10)),
        "by_part": _grouped(answers, answers.part_N, PARTS),
        "by_position": _grouped(answers, *_powers(answers.position_N, 2)),
    }


def calibration(answers):
    """Returns the expected calibration error, the mean over predictions of how far the
    accuracy of their bin is from its confidence (Guo et al. 2017), and the bins."""
    confidence_N = np.exp(-answers.top_losses_N)
    is_correct_N = answers.ranks_N == 0
    bin_N = np.minimum((confidence_N * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for b in np.unique(bin_N).tolist():
        here_N = bin_N == b
        confidence = float(confidence_N[here_N].mean())
        accuracy = float(is_correct_N[here_N].mean())
        num = int(here_N.sum())
        error += num / len(bin_N) * abs(accuracy - confidence)
        bins.append(
            {
                "from": b / BINS,
                "to": (b + 1) / BINS,
                "num_predictions": num,
                "confidence": confidence,
                "accuracy": accuracy,
            }
        )
    return {"expected_calibration_error": error, "bins": bins}


def _powers(values_N, base):
    """Returns the group of each value, and the groups' names: 0, 1, and from each power
    of `base` to below the next."""
    highest = int(values_N.max(initial=0))
    edges = [0, 1]
    while edges[-1] * base <= highest:
        edges.append(edges[-1] * base)
    ends = [edge - 1 for edge in edges[1:]] + [edges[-1] * base - 1]
    names = [
        f"{low:,}" if low == high else f"{low:,} to {high:,}"
        for low, high in zip(edges, ends, strict=True)
    ]
    return np.searchsorted(edges, values_N, side="right") - 1, names


def _grouped(answers, group_N, names):
    """Returns a line for each group that has predictions."""
    lines = []
    for group, name in enumerate(names):
        here_N = group_N == group
        if here_N.any():
            lines.append(
                {
                    "group": name,
                    "num_predictions": int(here_N.sum()),
                    "loss": float(answers.losses_N[here_N].mean()),
                    "accuracy": float((answers.ranks_N[here_N] == 0).mean()),
                }
            )
    return lines
