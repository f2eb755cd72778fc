"""Whole experiments, by the command's own main."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from mlm_jax import metrics, sweep
from mlm_jax.errors import InputError
from tests import runs

FILE = '''"""Which decay is best?"""

from mlm_jax.experiment.sweep import values

CONFIG = "configs/tiny.py"
ARMS = values("optim.peak_learning_rate", 1e-3, 3e-3, 1e-2, 1e30)
SEEDS = (3,)
BASELINE = "peak_learning_rate=0.001"
METRIC = "eval/loss@0.15"
SETTINGS = {settings} | {{
    "eval.rates": (0.15, 0.4),
    "parallel.mesh.data": 1,
    "optim.schedule": "linear",
    "optim.decay_begin": 4,
}}
TRUNK = {{"optim.num_steps": 4, "optim.peak_learning_rate": 1e-3}}
RUNGS = (6,)
'''


def run(path, out):
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(workdir=str(out)):
        sweep.main([str(path)])


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, shared):
    folder = tmp_path_factory.mktemp("experiment")
    settings = runs.OVERRIDES | {"data.cache_dir": str(shared / "rows")}
    (folder / "decays.py").write_text(FILE.format(settings=repr(settings)))
    run(folder / "decays.py", folder / "out")
    return folder


def lines(experiment, arm, name="metrics.jsonl"):
    return metrics.read_json_lines(experiment / "out" / arm / "seed3" / name)


def test_branches_share_the_trunk_and_then_differ(experiment):
    trunk, one, other = (
        lines(experiment, arm, "ledger.jsonl")
        for arm in ("trunk", "peak_learning_rate=0.001", "peak_learning_rate=0.003")
    )
    assert [line["step"] for line in trunk] == [1, 2, 3, 4]
    assert one[:4] == other[:4] == trunk
    assert one[5] == other[5]  # the same rows and masks
    losses = [
        lines(experiment, arm)[-1]["eval/loss@0.15"]
        for arm in ("peak_learning_rate=0.001", "peak_learning_rate=0.003")
    ]
    assert losses[0] != losses[1]


def test_half_of_the_arms_go_on_and_one_has_diverged(experiment):
    ends = {
        path.parent.name: lines(experiment, path.parent.name)[-1]["step"]
        for path in sorted((experiment / "out").glob("*/seed3"))
    }
    assert ends.pop("trunk") == 4
    assert ends.pop("peak_learning_rate=1e+30") in (4, 5)
    at_rung = {
        arm: line["eval/loss@0.15"]
        for arm in ends
        for line in lines(experiment, arm)
        if line["step"] == 6 and "eval/loss@0.15" in line
    }
    best = sorted(at_rung, key=at_rung.get)[:2]
    assert {arm for arm, step in ends.items() if step == 8} == set(best)
    diverged = experiment / "out" / "peak_learning_rate=1e+30" / "seed3"
    assert "loss nan" in json.loads((diverged / "diverged.json").read_text())["reason"]


def test_once_more_does_nothing(experiment, capsys):
    before = {p: p.stat().st_mtime_ns for p in experiment.rglob("*") if p.is_file()}
    run(experiment / "decays.py", experiment / "out")
    after = {p: p.stat().st_mtime_ns for p in experiment.rglob("*") if p.is_file()}
    assert after == before
    assert "starts" not in capsys.readouterr().out


def test_a_changed_arm_is_refused_by_name(experiment, tmp_path):
    text = (experiment / "decays.py").read_text()
    changed = tmp_path / "decays.py"
    changed.write_text(text.replace('"optim.decay_begin": 4', '"optim.decay_begin": 3'))
    with pytest.raises(InputError, match="trunk seed 3: .*decay_begin: 4 -> 3"):
        run(changed, experiment / "out")
