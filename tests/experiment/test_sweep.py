"""Experiment files, their algebra, and what is refused."""

import pathlib

import pytest

from mlm_jax import config
from mlm_jax.errors import InputError
from mlm_jax.experiment import sweep
from mlm_jax.experiment.sweep import arm, chain, product, values, zipped

FILE = '''"""Does it help?

More words.
"""

from mlm_jax.experiment.sweep import values

CONFIG = "configs/tiny.py"
ARMS = values("corruption.rate", 0.15, 0.3)
SEEDS = range(2)
BASELINE = "rate=0.15"
METRIC = "eval/loss@0.15"
SETTINGS = {"eval.rates": (0.15, 0.4)}
SMALL = {"optim.num_steps": 7}
'''


def written(tmp_path, text=FILE, **changes):
    path = tmp_path / "question.py"
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def names(arms):
    return [each.name for each in arms]


def test_values_name_what_they_set():
    arms = values("corruption.rate", 0.15, 0.4)
    assert names(arms) == ["rate=0.15", "rate=0.4"]
    assert arms[1].settings == {"corruption.rate": 0.4}
    assert names(values("eval.rates", (0.1, 0.2), label="exam")) == ["exam=0.1-0.2"]
    assert names(values("tokenizer.file", "a/b.txt")) == ["file=a_b.txt"]


def test_product_zipped_and_chain():
    rates = values("corruption.rate", 0.1, 0.2)
    widths = values("model.width", 8, 16)
    assert names(product(rates, widths)) == [
        "rate=0.1,width=8",
        "rate=0.1,width=16",
        "rate=0.2,width=8",
        "rate=0.2,width=16",
    ]
    pairs = zipped(rates, widths)
    assert names(pairs) == ["rate=0.1,width=8", "rate=0.2,width=16"]
    assert pairs[1].settings == {"corruption.rate": 0.2, "model.width": 16}
    assert chain(rates, arm("wide", model__width=32))[-1] == (
        "wide",
        {"model.width": 32},
    )
    with pytest.raises(ValueError):
        zipped(rates, values("seed", 1))


def test_a_file_becomes_runs(tmp_path):
    experiment = sweep.load(written(tmp_path))
    assert experiment.question.splitlines()[0] == "Does it help?"
    runs = sweep.runs(experiment, tmp_path)
    assert [run.name for run in runs] == [
        "rate=0.15 seed 0",
        "rate=0.3 seed 0",
        "rate=0.15 seed 1",
        "rate=0.3 seed 1",
    ]
    assert runs[3].directory == tmp_path / "rate=0.3" / "seed1"
    c = runs[3].config
    assert (c.corruption.rate, c.seed, c.eval.rates) == (0.3, 1, (0.15, 0.4))
    assert c.optim.num_steps == 400

    small = sweep.load(written(tmp_path) + ":small")
    assert small.name == "question_small"
    assert sweep.runs(small, tmp_path)[0].config.optim.num_steps == 7


def test_pairs_share_a_seed_unless_told_otherwise(tmp_path):
    def seeds(path):
        return [run.config.seed for run in sweep.runs(sweep.load(path), tmp_path)]

    assert seeds(written(tmp_path)) == [0, 0, 1, 1]
    assert len(set(seeds(written(tmp_path, FILE + "PAIRED = False\n")))) == 4


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("BASELINE =", "BASLINE =", "BASLINE does not exist; did you mean BASELINE"),
        ('"rate=0.15"', '"rate=0.16"', "rate=0.16 does not exist; did .* rate=0.15"),
        ("loss@0.15", "loss@0.2", "METRIC = eval/loss@0.2 does not exist"),
        ("eval.rates", "eval.rate", "arm rate=0.15: eval.rate does .* eval.rates"),
        ("0.15, 0.3)", "0.15, 1.5)", "config.corruption.rate = 1.5; expected"),
        ("0.15, 0.3)", "0.15, 'x')", "arm rate=x: corruption.rate = 'x'"),
        ("0.15, 0.3)", "0.15, 0.15)", "two arms are named 'rate=0.15'"),
        ("range(2)", "()", "no seed"),
        ("range(2)", "(1, 1)", "a seed twice"),
        ("tiny.py", "tinny.py", "no such file; did you mean .*tiny.py"),
        ('"""Does it help?\n\nMore words.\n"""', "", "the question is missing"),
        ("METRIC =", "import nothing_there\nMETRIC =", "ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, message):
    with pytest.raises(InputError, match=message):
        sweep.runs(sweep.load(written(tmp_path, change=(old, new))), tmp_path)


def test_variants_and_files_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="no variant 'tiny'; there is .*:small"):
        sweep.load(written(tmp_path) + ":tiny")
    with pytest.raises(InputError, match="no small variant"):
        sweep.load(written(tmp_path, change=("SMALL = ", "_ = ")) + ":small")
    with pytest.raises(InputError, match="no such file"):
        sweep.load(str(tmp_path / "nothing.py"))


def test_a_group_shares_shape_and_nearly_the_slots(tmp_path):
    path = written(tmp_path, change=("0.15, 0.3)", "0.15, 0.16, 0.9)"))
    experiment = sweep.load(path)
    arms = chain(experiment.arms, arm("wide", model__width=256))
    runs = sweep.runs(experiment._replace(arms=arms), tmp_path)

    def cost(c, slots=None):
        slots = slots or round(100 * c.corruption.rate)
        return slots, 100 + slots

    found = [[run.name for run in group] for group in sweep.groups(runs, cost)]
    assert found == [
        ["rate=0.9 seed 0", "rate=0.9 seed 1"],
        [
            "rate=0.16 seed 0",
            "rate=0.16 seed 1",
            "rate=0.15 seed 0",
            "rate=0.15 seed 1",
        ],
        ["wide seed 0", "wide seed 1"],
    ]


def test_shipped_experiments_can_be_run(tmp_path):
    files = sorted(pathlib.Path("experiments").glob("*.py"))
    assert files
    for path in files:
        for variant in ("", ":small"):
            runs = sweep.runs(sweep.load(f"{path}{variant}"), tmp_path)
            assert len({run.directory for run in runs}) == len(runs)
            assert all(config.check(run.config) is None for run in runs)
