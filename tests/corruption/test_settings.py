"""What a config's corruption section means in numbers, and what it may not say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from mlm_jax import config
from mlm_jax.corruption import policy, schedule, settings, units, weights
from mlm_jax.errors import InputError
from tests.corruption.helpers import numbers
from tests.helpers import corruption, hparams

# ---- lengths ------------------------------------------------------------------------


def test_tables_of_lengths_by_hand():
    def shares(*law):
        cdf_K = settings.length_cdf(*law)
        assert cdf_K.shape == (15,) and cdf_K.dtype == np.float32
        return np.diff(np.append(np.append(0, cdf_K.astype(float)), 1))

    spanbert = shares("geometric", 0.2, 1, 10)
    # Joshi et al. 2020, figure 2: 22% of one word, 3% of ten, 3.8 on average.
    np.testing.assert_allclose(spanbert[[0, 9]], [0.224, 0.030], atol=5e-4)
    np.testing.assert_allclose(spanbert @ np.arange(1, 17), 3.797, atol=1e-3)
    assert (spanbert[10:] == 0).all()
    albert = shares("inverse", 0.5, 1, 3)  # Lan et al. 2020: 6/11, 3/11, 2/11
    np.testing.assert_allclose(albert[:3], np.array([6, 3, 2]) / 11, atol=1e-6)
    assert (albert[3:] == 0).all()
    np.testing.assert_allclose(shares("uniform", 0.5, 1, 16), 1 / 16, atol=1e-6)
    assert shares("geometric", 0.2, 16, 16).argmax() == 15
    assert shares("geometric", 0.2, 1, 1)[0] == 1


# ---- rates --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, hidden, final, share, highest",
    [
        ({"rate": 0.15}, 0.15, 0.15, 1, 0.15),
        (
            {"rate": 0.3, "schedule": "linear", "final_rate": 0.15},
            0.3,
            0.15,
            1,
            0.3,
        ),
        ({"rate": 0.1, "schedule": "step", "final_rate": 0.6}, 0.1, 0.6, 1, 0.6),
        ({"corruption_rate": 0.4, "prediction_rate": 0.1}, 0.4, 0.4, 0.25, 0.1),
        ({"rate": 0.2, "prediction_rate": 0.4, "views": 2}, 0.2, 0.2, 2, 0.2),
        ({"rate": 0.2, "views": 3}, 0.2, 0.2, 3, 0.2),
        ({"row_rate": (0.1, 0.7)}, 0.15, 0.15, 1, 0.7),
    ],
)
def test_rates(changes, hidden, final, share, highest):
    section = corruption(**changes)
    settings.check(section)
    np.testing.assert_allclose(settings.rates(section), (hidden, final, share))
    np.testing.assert_allclose(settings.highest_rate(section), highest, rtol=1e-6)
    assert settings.hparams(section)["predicted_share"] == np.float32(min(share, 1))


def test_slack_is_none_for_tokens_and_grows_with_the_longest_unit():
    slack = {
        strategy: settings.slack(corruption(strategy=strategy))
        for strategy in units.STRATEGIES
    }
    assert slack["token"] == 0 < slack["word"] < slack["ngram"] < slack["span"]
    assert slack["word"] < slack["pmi"]
    one = settings.slack(corruption(strategy="span", span_max=1))
    assert one == slack["word"]


def rates_at(progress, **changes):
    section = corruption(rate=0.3, **changes)
    settings.check(section)
    rate_at = jax.jit(jax.vmap(schedule.rate_at, in_axes=(0, None)))
    return np.asarray(rate_at(np.float32(progress), settings.hparams(section)))


@pytest.mark.parametrize(
    "form, half, at_3_8",
    [
        ("linear", 0.25, 0.2625),
        ("cosine", 0.25, 0.3 - 0.05 * (1 - np.cos(0.375 * np.pi))),
        ("step", 0.3, 0.3),
    ],
)
@pytest.mark.parametrize("begin, end", [(0.0, 1.0), (0.2, 0.6)])
def test_schedules_at_their_boundaries(form, half, at_3_8, begin, end):
    before, after = np.nextafter(np.float32([begin, end]), np.float32([-1, 2]))
    inside = [begin + share * (end - begin) for share in (0.375, 0.5)]
    rates = rates_at(
        [0, before, begin, *inside, end, after, 1, 2],
        schedule=form,
        final_rate=0.2,
        schedule_begin=begin,
        schedule_end=end,
    )
    np.testing.assert_array_equal(rates[:3], np.float32(0.3))  # exactly
    np.testing.assert_allclose(rates[3:5], [at_3_8, half], rtol=1e-5)
    np.testing.assert_array_equal(rates[5:], np.float32(0.2))


def test_a_constant_rate_is_constant_and_a_schedule_without_length_is_a_step():
    assert set(rates_at(np.linspace(0, 1, 9))) == {np.float32(0.3)}
    for form in ("linear", "cosine", "step"):
        for at in (0.0, 0.5, 1.0):
            rates = rates_at(
                [at - 0.01, at, at + 0.01],
                schedule=form,
                final_rate=0.6,
                schedule_begin=at,
                schedule_end=at,
            )
            np.testing.assert_allclose(rates[[0, 2]], [0.3, 0.6], rtol=1e-6)
            if form == "step":  # "at once at `schedule_end`"
                assert rates[1] == np.float32(0.6)


def test_a_schedules_ends_are_exact_so_that_slots_are_enough():
    rates = np.linspace(0.01, 1, 60, dtype=np.float32)
    numbers_of = numbers(0.3, schedule="linear", final_rate=0.2)

    def ends(rate, final_rate):
        changed = numbers_of | {"rate": rate, "final_rate": final_rate}
        return schedule.rate_at(jnp.array([0.0, 1.0]), changed)

    grid = jax.jit(jax.vmap(jax.vmap(ends, (None, 0)), (0, None)))(rates, rates)
    np.testing.assert_array_equal(
        grid[:, :, 0], np.broadcast_to(rates[:, None], (60, 60))
    )
    np.testing.assert_array_equal(grid[:, :, 1], np.broadcast_to(rates[None], (60, 60)))


# ---- weights of tokens --------------------------------------------------------------


def test_weights_of_tokens_by_hand():
    counts_V = np.array([0, 1, 9, 10**12])
    weight_V = weights.inverse_frequency(counts_V, {})
    np.testing.assert_allclose(weight_V, [1, 0.5, 0.1, 1e-12], rtol=1e-5)
    assert weights.uniform(counts_V, {}) is None
    updated_V = weights.updated(
        np.float32([4, 4, 4]), np.float32([0, 2, 6]), np.float32([0, 1, 3]), 0.75
    )
    np.testing.assert_allclose(updated_V, [4, 3.5, 3.5])


# ---- what does not go together ------------------------------------------------------

REFUSED = [  # (changes, the fields that the one line must name)
    ({"schedule": "linear"}, "final_rate"),
    ({"final_rate": 0.2}, "final_rate"),
    ({"prediction_rate": 0.4}, "views"),
    ({"prediction_rate": 0.2, "views": 2}, "views"),
    ({"rate": 0.2, "prediction_rate": 0.5, "views": 2}, "views"),
    ({"corruption_rate": 0.4, "prediction_rate": 0.1, "views": 2}, "views"),
    ({"rate": 0.4, "views": 3}, "views"),
    ({"row_rate": (0.1, 0.6), "views": 2}, "views"),
    ({"schedule": "step", "final_rate": 0.6, "views": 2}, "views"),
    ({"strategy": "span", "span_min": 4, "span_max": 3}, "span_min"),
    (
        {
            "schedule": "linear",
            "final_rate": 0.2,
            "schedule_begin": 0.6,
            "schedule_end": 0.5,
        },
        "schedule_begin",
    ),
    ({"strategy": "pmi"}, "collocations"),
    ({"collocations": "list.txt"}, "collocations"),
]


@pytest.mark.parametrize("changes, field", REFUSED)
def test_numbers_that_do_not_go_together_are_refused(changes, field):
    with pytest.raises(InputError) as caught:
        settings.check(corruption(**changes))
    message = str(caught.value)
    assert f"config.corruption.{field} = " in message and "\n" not in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rate": 0.5, "views": 2},
        {"rate": 1 / 3, "views": 3},
        {"rate": 1.0},
        {"rate": 0.15, "prediction_rate": 0.45, "views": 3},
        {"strategy": "span", "span_min": 3, "span_max": 3},
        {"schedule": "step", "final_rate": 0.2, "schedule_begin": 0.5}
        | {"schedule_end": 0.5},
        {"strategy": "pmi", "collocations": "list.txt"},
    ],
)
def test_numbers_that_go_together_are_taken(changes):
    settings.check(corruption(**changes))


FIELDS = [
    ("strategy", "sentence"),
    ("span_lengths", "poisson"),
    ("span_p", 1.0),
    ("span_p", 0.0),
    ("span_min", 0),
    ("span_max", 17),
    ("ngram_max", 0),
    ("ngram_max", 17),
    ("rate", 0.0),
    ("final_rate", 1.1),
    ("schedule", "square"),
    ("schedule_begin", -0.1),
    ("schedule_end", 1.1),
    ("row_rate", (0.1,)),
    ("row_rate", (0.0, 0.5)),
    ("row_rate", (0.5, 0.1)),
    ("row_rate", (0.5, 1.1)),
    ("weighting", "rate"),
    ("corruption_rate", 0.0),
    ("prediction_rate", -0.1),
    ("views", 0),
    ("min_predictions", -1),
    ("random_pool", "uniform"),
    ("replacement_unit", "word"),
    ("duplicates", 0),
    ("token_weights", "loss"),
    ("weight_power", -1.0),
    ("token_loss_decay", 1.0),
]


@pytest.mark.parametrize("field, value", FIELDS)
def test_values_out_of_range_are_refused_by_field(field, value):
    c = base.get_config()
    c.corruption[field] = value
    with pytest.raises(InputError) as caught:
        config.check(c)
    message = str(caught.value)
    assert f"config.corruption.{field} = {value!r}" in message and "\n" not in message


# ---- the numbers traced -------------------------------------------------------------


def test_hparams_by_hand():
    found = settings.hparams(
        corruption(
            rate=0.2,
            schedule="cosine",
            final_rate=0.4,
            schedule_begin=0.25,
            schedule_end=0.75,
            row_rate=(0.1, 0.5),
            weighting="inverse_rate",
            replacement_unit="unit",
            dynamic=False,
            duplicates=7,
            min_predictions=3,
        )
    )
    want = {
        "rate": 0.2,
        "final_rate": 0.4,
        "schedule": 2,
        "schedule_begin": 0.25,
        "schedule_end": 0.75,
        "row_rate_low": 0.1,
        "row_rate_high": 0.5,
        "weight_by_rate": True,
        "replace_per_unit": True,
        "mask_period": 7,
        "min_predictions": 3,
        "mask_frac": 0.8,
        "random_frac": 0.1,
        "predicted_share": 1,
    }
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    assert settings.hparams(corruption())["mask_period"] == 2**31 - 1
    assert settings.hparams(corruption())["row_rate_high"] == 0


def test_every_section_gives_the_same_tree():
    """Or a sweep, a population or a resume would compile anew."""
    trees = [
        jax.tree.map(lambda x: (np.shape(x), x.dtype), settings.hparams(section))
        for section in (
            corruption(),
            corruption(strategy="ngram", row_rate=(0.1, 0.2), dynamic=False),
            corruption(corruption_rate=0.4, prediction_rate=0.1, weighting="equal"),
            corruption(strategy="span", span_max=16),
        )
    ]
    assert all(tree == trees[0] for tree in trees)
    assert trees[0].keys() <= hparams().keys()
    assert policy.MAX_UNIT >= 1
