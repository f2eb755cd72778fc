"""What a config's corruption section means in numbers. Imports no jax."""

import math

import numpy as np

from mlm_jax.errors import InputError

MAX_WORDS = 16  # in a unit: the length of every table of unit lengths
# The order is that of the values in `schedule.rate_at`: a schedule's form is a number.
SCHEDULES = ("constant", "linear", "cosine", "step")
MAX_COLLOCATION = 5  # words, as in the PMI-masking paper (Levine et al. 2021)
NEVER = 2**31 - 1  # the period of masks that do not come again


# The corruption section of every evaluation; its rate and fractions are in `eval`. The
# numbers of units are SpanBERT's and ALBERT's, for exams of other strategies.
EXAM = {
    "strategy": "token",
    "span_lengths": "geometric",
    "span_p": 0.2,
    "span_min": 1,
    "span_max": 10,
    "ngram_max": 3,
    "schedule": "constant",
    "final_rate": None,
    "schedule_begin": 0.0,
    "schedule_end": 1.0,
    "row_rate": (),
    "weighting": "equal",
    "corruption_rate": None,
    "prediction_rate": None,
    "views": 1,
    "count": "exact",
    "min_predictions": 1,
    "random_pool": "non_special",
    "replacement_unit": "token",
    "dynamic": True,
    "token_weights": "uniform",
    "weight_power": 0.0,
    "token_loss_decay": 0.0,
}


def geometric(n, p):
    """SpanBERT's (Joshi et al. 2020): p(n) in proportion to (1 - p)^n."""
    return (1 - p) ** n


def uniform(n, p):
    """Every length is as likely."""
    del p
    return np.ones_like(n)


def inverse(n, p):
    """ALBERT's n-grams (Lan et al. 2020): p(n) in proportion to 1 / n."""
    del p
    return 1 / n


LENGTHS = {"geometric": geometric, "uniform": uniform, "inverse": inverse}


def length_cdf(lengths, p, low, high):
    """Returns float32[15]: P(a unit has at most n words) for n = 1 … 15."""
    n = np.arange(1, MAX_WORDS + 1, dtype=np.float64)
    weights = np.where((n >= low) & (n <= high), LENGTHS[lengths](n, p), 0)
    return (np.cumsum(weights) / weights.sum())[:-1].astype(np.float32)


def rates(corruption):
    """Returns (rate hidden at the start, at the end, predictions per hidden token)."""
    hidden = corruption.rate
    if corruption.corruption_rate is not None:
        hidden = corruption.corruption_rate
    final = hidden if corruption.final_rate is None else corruption.final_rate
    predicted = corruption.prediction_rate
    share = corruption.views if predicted is None else predicted / hidden
    return hidden, final, share


def highest_rate(corruption):
    """Returns the largest share of a row that one view can be asked to predict."""
    hidden, final, share = rates(corruption)
    highest = max(hidden, final, *corruption.row_rate)
    return np.float32(highest) * np.float32(min(share, 1))  # as on the device


def slack(corruption):
    """Returns how far a unit may reach past a row's budget, in tokens.

    Two tokens a word and six more: longer units are rare, and left out where they would
    cross the budget.
    """
    words = {
        "token": 0,
        "word": 1,
        "span": corruption.span_max,
        "ngram": corruption.ngram_max,
        "pmi": MAX_COLLOCATION,
    }[corruption.strategy]
    return 2 * words + 6 if words else 0


def check(corruption):
    """Raises InputError for numbers that do not go together."""
    hidden, final, share = rates(corruption)
    views = corruption.views
    if (corruption.final_rate is None) != (corruption.schedule == "constant"):
        raise InputError(
            f"config.corruption.final_rate = {corruption.final_rate}; a constant "
            "schedule has none, every other needs one."
        )
    others = "final_rate", "corruption_rate", "prediction_rate"
    given = [name for name in others if corruption[name] is not None]
    if corruption.row_rate and given:
        raise InputError(
            f"config.corruption.row_rate = {corruption.row_rate}; expected () beside "
            f"config.corruption.{given[0]}, which it would overrule."
        )
    if share > 1 and not math.isclose(share, views):
        raise InputError(
            f"config.corruption.views = {views}; predicting {share:g} times what is "
            f"hidden takes that many views of a row, a whole number."
        )
    if share < 1 and views > 1:
        raise InputError(
            f"config.corruption.views = {views}; expected 1 where fewer tokens are "
            "predicted than corrupted."
        )
    top = max(hidden, final, *corruption.row_rate) * views
    if top > 1 + 1e-6:
        raise InputError(
            f"config.corruption.views = {views} at rates up to {top / views:g} would "
            f"hide {top:g} of a row; at most 1 is there."
        )
    if (corruption.collocations is None) == (corruption.strategy == "pmi"):
        raise InputError(
            f"config.corruption.collocations = {corruption.collocations!r} with "
            f"strategy {corruption.strategy}; pmi needs a list (mine_collocations "
            "makes one), no other strategy reads it."
        )
    _check_order(corruption, "span_min", "span_max")
    _check_order(corruption, "schedule_begin", "schedule_end")


def _check_order(corruption, low, high):
    if corruption[low] > corruption[high]:
        raise InputError(
            f"config.corruption.{low} = {corruption[low]}; expected at most "
            f"config.corruption.{high} = {corruption[high]}."
        )


def hparams(corruption):
    """Returns the numbers that `policy.make_corrupt` traces."""
    hidden, final, share = rates(corruption)
    low, high = corruption.row_rate or (0, 0)
    if corruption.strategy == "ngram":
        cdf = length_cdf("inverse", 0, 1, corruption.ngram_max)
    else:
        lengths = corruption.span_lengths, corruption.span_p
        cdf = length_cdf(*lengths, corruption.span_min, corruption.span_max)
    return {
        "rate": np.float32(hidden),
        "final_rate": np.float32(final),
        "schedule": np.int32(SCHEDULES.index(corruption.schedule)),
        "schedule_begin": np.float32(corruption.schedule_begin),
        "schedule_end": np.float32(corruption.schedule_end),
        "row_rate_low": np.float32(low),
        "row_rate_high": np.float32(high),
        "weight_by_rate": np.bool_(corruption.weighting == "inverse_rate"),
        "predicted_share": np.float32(min(share, 1)),
        "min_predictions": np.int32(corruption.min_predictions),
        "mask_frac": np.float32(corruption.mask_frac),
        "random_frac": np.float32(corruption.random_frac),
        "replace_per_unit": np.bool_(corruption.replacement_unit == "unit"),
        "mask_period": np.int32(NEVER if corruption.dynamic else corruption.duplicates),
        "length_cdf": cdf,
        "weight_power": np.float32(corruption.weight_power),
        "token_loss_decay": np.float32(corruption.token_loss_decay),
    }
