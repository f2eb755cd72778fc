"""Runs trained together give what each gives alone."""

import jax
import numpy as np
import pytest

from configs import tiny
from mlm_jax import (
    checkpoint,
    config,
    metrics,
    parallel,
    plan,
    population,
    program,
    workdir,
)
from mlm_jax.data import rows
from mlm_jax.data.tokenizer import Vocabulary
from mlm_jax.errors import Preempted
from mlm_jax.experiment import sweep
from mlm_jax.training import Training, drive
from tests import runs

ARMS = (
    {},
    {"seed": 1},
    {"corruption.rate": 0.15, "seed": 2},
    {"corruption.mask_frac": 1.0, "corruption.random_frac": 0.0},
    {"corruption.schedule": "linear", "corruption.final_rate": 0.1},
    {"optim.peak_learning_rate": 0.01, "optim.warmup_steps": 0},
    {"optim.weight_decay": 0.5, "optim.clip_norm": 0.1},
    {"corruption.dynamic": False, "corruption.duplicates": 2},
)


def make_config(shared, num_steps, settings):
    c = tiny.get_config().copy_and_resolve_references()
    fields = runs.OVERRIDES | {"data.cache_dir": str(shared / "rows")}
    fields |= {"optim.num_steps": num_steps, "eval.fill_mask": ()} | settings
    c.update_from_flattened_dict(fields)
    config.check(c)
    return c


class NoStop:
    asked = None

    def look(self, step):
        pass


class StopAt(NoStop):
    """A signal that comes before a step."""

    def __init__(self, at):
        self._at = at

    def look(self, step):
        self.asked = "SIGTERM" if step == self._at else self.asked


@pytest.fixture(scope="module")
def laboratory(shared):
    """One program, and what makes trainings for it."""
    c = make_config(shared, 8, {})
    store = rows.prepare(c.data, c.tokenizer, log=lambda line: None)
    mesh = parallel.make_mesh({"data": 1})
    slots = program.num_slots(c, c.corruption)
    made = program.make_program(c, store.tokenizer, store.token_counts, mesh, slots)

    class Laboratory:
        program = made
        step = staticmethod(population.make_step(made.step, 8))

        @staticmethod
        def trainings(folder, arms=ARMS, num_steps=8):
            for i, settings in enumerate(arms):
                c = make_config(shared, num_steps, settings)
                directory = folder / str(i)
                with workdir.held(directory):
                    yield Training(c, directory, store, made, mesh)

        def alone(self, *args, **kwargs):
            for training in self.trainings(*args, **kwargs):
                drive(training, self.program.train_step, NoStop())

        def together(self, *args, stop=None, **kwargs):
            trainings = list(self.trainings(*args, **kwargs))
            return population.drive(trainings, self.step, stop or NoStop())

    return Laboratory()


def lines(directory, name):
    return metrics.read_json_lines(directory / name)


def assert_equal_runs(a, b, *, num_runs=8, norm_tolerance=1e-5):
    """Masks bit for bit, losses to 1e-5."""
    for i in range(num_runs):
        ledger = lines(a / str(i), "ledger.jsonl")
        assert ledger == lines(b / str(i), "ledger.jsonl") and ledger
        pairs = zip(
            lines(a / str(i), "metrics.jsonl"),
            lines(b / str(i), "metrics.jsonl"),
            strict=True,
        )
        for line, other in pairs:
            assert line["step"] == other["step"]
            for name in line.keys() & other.keys():
                if "loss" in name:
                    np.testing.assert_allclose(line[name], other[name], rtol=1e-5)
                elif "grad_norm" in name:
                    np.testing.assert_allclose(
                        line[name], other[name], rtol=norm_tolerance
                    )


@pytest.fixture(scope="module")
def alone(laboratory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    laboratory.alone(folder)
    return folder


def test_eight_runs_together_equal_each_alone(laboratory, alone, tmp_path):
    assert not laboratory.together(tmp_path)
    assert_equal_runs(tmp_path, alone)
    assert laboratory.step.update._cache_size() == 1
    hashes = {lines(tmp_path / str(i), "ledger.jsonl")[2]["mask_hash"] for i in (0, 1)}
    assert len(hashes) == 2  # by seed


def test_a_run_taken_out_is_an_ordinary_one(laboratory, alone, tmp_path):
    """Half way together, then alone."""
    with pytest.raises(Preempted):
        laboratory.together(tmp_path, stop=StopAt(5))
    for i in range(8):
        assert checkpoint.steps(tmp_path / str(i) / "checkpoints") == [5, 4]
    laboratory.alone(tmp_path)
    assert_equal_runs(tmp_path, alone)


def test_a_run_that_diverges_stops_and_harms_no_other(laboratory, alone, tmp_path):
    arms = [*ARMS[:5], {"optim.peak_learning_rate": 1e30}, *ARMS[6:]]
    failed = laboratory.together(tmp_path, arms=arms)
    assert list(failed) == [5] and "step" in str(failed[5])
    for i in {0, 1, 2, 3, 4, 6, 7}:
        ours, theirs = (
            lines(x / str(i), "metrics.jsonl")[-1] for x in (tmp_path, alone)
        )
        assert ours["step"] == theirs["step"] == 8
        name = "eval/loss@0.15"
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


def test_runs_may_end_at_different_steps_and_leave_places_empty(
    laboratory, alone, tmp_path
):
    arms = [ARMS[0], ARMS[1] | {"optim.num_steps": 4}]
    laboratory.together(tmp_path, arms=arms)
    assert lines(tmp_path / "1", "ledger.jsonl")[-1]["step"] == 4
    assert_equal_runs(tmp_path, alone, num_runs=1)


def test_nothing_traced_changes_the_program(shared):
    """All fields of config.TRACED changed at once, at the same number of slots."""
    changed = {
        "corruption.final_rate": 0.1,
        "corruption.schedule": "cosine",
        "corruption.schedule_begin": 0.1,
        "corruption.weighting": "inverse_rate",
        "corruption.corruption_rate": 0.2,
        "corruption.prediction_rate": 0.1,
        "corruption.replacement_unit": "unit",
        "corruption.span_lengths": "uniform",
        "corruption.span_max": 3,
        "optim.on_nonfinite": "skip",
        "eval.fill_mask": ("a [MASK].",),
        "eval.minimal_pairs": "bundled:agreement",
    }
    values = config.flatten(make_config(shared, 8, {}))
    for name in config.TRACED - changed.keys() - {"corruption.row_rate"}:
        value = values[name]
        number = value + 1 if isinstance(value, int) else value / 2
        changed[name] = not value if isinstance(value, bool) else number
    programs = set()
    for settings in ({}, changed, {"corruption.row_rate": (0.1, 0.2)}):
        c = make_config(shared, 8, settings)
        mesh = parallel.make_mesh({"data": 1})
        made = program.make_program(c, Vocabulary(64), np.ones(64), mesh, 8)
        batch = plan.abstract_batch(c, mesh)
        programs.add(str(jax.make_jaxpr(made.step)(made.abstract_state, batch)))
        assert sweep.shape_of(c) == sweep.shape_of(make_config(shared, 8, {}))
    assert len(programs) == 1


@pytest.mark.slow
def test_two_hundred_steps(laboratory, tmp_path):
    settings = {"eval.every_steps": 100, "checkpoint.every_steps": 100}
    arms = [arm | settings for arm in ARMS]
    laboratory.alone(tmp_path / "alone", arms=arms, num_steps=200)
    laboratory.together(tmp_path / "together", arms=arms, num_steps=200)
    # The arm without warm-up at a rate of 0.01 has the norms of its steepest steps
    # differ by 1e-4.
    both = tmp_path / "together", tmp_path / "alone"
    assert_equal_runs(*both, norm_tolerance=2e-4)
