"""From the runs of an experiment to the facts of its report, ready to be JSON.

A pure function of what the runs have written. Whatever depends on the clock is under
`wall_clock`, and nowhere else.
"""

import collections
import difflib
import math

import numpy as np

from mlm_jax import config
from mlm_jax.errors import InputError
from mlm_jax.experiment import comparison, optima, statistics
from mlm_jax.files import finite

AXES = ("steps", "tokens", "predictions", "flops")
NOT_COMPARED = ("seed", *config.FREE_ON_RESUME)


def make_facts(experiment, runs):
    """Returns the facts of the `results.Run`s of an experiment.

    Raises InputError for a metric that no run has.
    """
    finished = {
        arm.name: {
            run.seed: run
            for run in runs
            if run.arm == arm.name and run.state == "finished"
        }
        for arm in experiment.arms
    }
    exams = _exams(experiment, runs)
    optimum_rows, trend = _optima(experiment, finished, exams)
    compared = {
        exam: comparison.compare(
            experiment, comparison.last_values(finished, exam), exam
        )
        for exam in exams
    }
    facts = {
        "experiment": _describe(experiment),
        "fields": _fields(experiment, runs),
        "runs": [_state(run) for run in runs],
        "exams": exams,
        "comparison": compared,
        "equal_flops": comparison.at_equal_flops(experiment, finished),
        "rungs": comparison.at_rungs(experiment, runs),
        "own_rate": _own_rates(finished),
        "matrix": _matrix(experiment, compared),
        "optima": optimum_rows,
        "trend": trend,
        "curves": _curves(finished, AXES, experiment.metric),
        "provenance": _provenance(runs),
        "warnings": _warnings(experiment, runs, compared),
        "wall_clock": {
            "speed": _speeds(finished),
            "curves": _curves(finished, ("seconds",), experiment.metric),
        },
    }
    return finite(facts)


def _describe(experiment):
    fields = experiment._asdict()
    fields["arms"] = [arm._asdict() for arm in experiment.arms]
    return fields


def _exams(experiment, runs):
    """Returns the metric, and the same one at the other evaluation rates."""
    names = {name for run in runs if run.curves for name in run.curves.values}
    if names and experiment.metric not in names:
        near = difflib.get_close_matches(experiment.metric, names, 1, 0)
        raise InputError(
            f"{experiment.name}.py: METRIC = {experiment.metric!r} is in no run's "
            f"metrics.jsonl; did you mean {near[0]}?"
        )
    kind = experiment.metric.partition("@")[0]
    others = {n for n in names if n.partition("@")[0] == kind} - {experiment.metric}
    return [experiment.metric, *sorted(others, key=exam_rate)]


def exam_rate(exam):
    return float(exam.partition("@")[2] or "nan")


def _fields(experiment, runs):
    """Returns {field: {arm: value}} of what differs between arms."""
    configs = {run.arm: run.config for run in runs if run.config}
    names = {name for arm in experiment.arms for name in arm.settings}
    names |= set(_unplanned(experiment, runs))
    return {
        name: {
            arm.name: _config_of(experiment, arm, configs).get(name)
            for arm in experiment.arms
        }
        for name in sorted(names)
    }


def _config_of(experiment, arm, configs):
    return experiment.base | arm.settings | configs.get(arm.name, {})


def _unplanned(experiment, runs):
    """Returns fields in which runs differ although no arm sets them."""
    planned = {name for arm in experiment.arms for name in arm.settings}
    values = collections.defaultdict(set)
    for run in runs:
        for name, value in run.config.items():
            values[name].add(value)
    return sorted(
        name
        for name, found in values.items()
        if len(found) > 1 and name not in planned and not name.startswith(NOT_COMPARED)
    )


def _state(run):
    step = int(run.curves.steps[-1]) if run.curves and len(run.curves.steps) else None
    fields = {name: getattr(run, name) for name in ("arm", "seed", "state", "reason")}
    return fields | {"step": step}


def _own_rates(finished):
    rows = []
    for name, by_seed in finished.items():
        losses = [run.own_rate_loss for run in by_seed.values()]
        rates = sorted({run.config[optima.RATE] for run in by_seed.values()})
        rows.append({"arm": name, "rates": rates, "mean": comparison.estimate(losses)})
    return rows


def _matrix(experiment, compared):
    """Returns the mean for each arm and exam, where arms differ in their rate."""
    rates = {arm.settings.get(optima.RATE) for arm in experiment.arms}
    if len(rates) < 2 or len(compared) < 2:
        return None
    exams = sorted(compared, key=exam_rate)
    means = [
        [row["mean"] and row["mean"]["mean"] for row in compared[exam]]
        for exam in exams
    ]
    return {
        "arms": [arm.name for arm in experiment.arms],
        "exams": exams,
        "means": [list(row) for row in zip(*means, strict=True)],
    }


def _optima(experiment, finished, exams):
    """Returns a row for each exam and group of arms, and the trend of the metric."""
    if not comparison.is_less_better(experiment.metric):
        return [], None
    groups = optima.find_groups(experiment, finished)
    rows = {exam: [optima.fit_group(group, exam) for group in groups] for exam in exams}
    trend = optima.fit_trend(groups, rows[experiment.metric], experiment.metric)
    return [row for found in rows.values() for row in found], trend


def _curves(finished, axes, metric):
    """Returns {arm: axes and the metric's mean and interval at each evaluation} over
    the seeds that have finished."""
    curves = {}
    for arm, by_seed in finished.items():
        if not by_seed:
            continue
        found = [run.curves for run in by_seed.values()]
        values_SxK = np.array([curve.values[metric] for curve in found])
        estimates = [statistics.estimate(values_S) for values_S in values_SxK.T]
        curves[arm] = {
            axis: np.mean([getattr(curve, axis) for curve in found], axis=0).tolist()
            for axis in axes
        } | {
            name: [getattr(e, name) for e in estimates]
            for name in ("mean", "low", "high")
        }
    return curves


def _speeds(finished):
    return [
        {
            "arm": name,
            "tokens_per_second": _mean(r.tokens_per_second for r in by_seed.values()),
            "seconds": _mean(float(r.curves.seconds[-1]) for r in by_seed.values()),
        }
        for name, by_seed in finished.items()
    ]


def _mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def _provenance(runs):
    """Returns {what: {value: number of runs}}."""
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for run in runs:
        environment = run.environment
        for name in ("data.fingerprint", "tokenizer.digest"):
            if environment:
                found[name][environment[name]] += 1
        seen = collections.defaultdict(set)  # a resumed run may have had several
        for start in environment.get("starts", ()):
            for name in ("git", "python", "machine", "devices"):
                seen[name].add(str(start.get(name)))
            for package, version in start["packages"].items():
                seen[package].add(str(version))
        for name, values in seen.items():
            found[name].update(values)
    return {name: dict(sorted(counts.items())) for name, counts in found.items()}


def _warnings(experiment, runs, compared):
    """Returns sentences on whatever limits what the numbers can say."""
    rows = [r for r in compared[experiment.metric] if r["arm"] != experiment.baseline]
    pairs = [len(row["differences"]) for row in rows if row["differences"]]
    texts = []
    if not pairs:
        texts.append(
            "No arm has a seed that finished for the baseline too: nothing is compared."
        )
    elif max(pairs) > 1:
        texts.append(statistics.power_sentence(max(pairs), len(pairs)))
    single = [row["arm"] for row in compared[experiment.metric] if row["n"] == 1]
    if single:
        texts.append(
            f"One seed only, so no interval and no test: {', '.join(single)}. What "
            "differs there may be chance."
        )
    uneven = [
        f"{row['arm']} ({len(row['differences'])})"
        for row in rows
        if len(row["differences"]) < len(experiment.seeds)
    ]
    if uneven:
        texts.append(f"Compared over fewer seeds than planned: {', '.join(uneven)}.")
    for exam in compared:
        if len(_mask_hashes(runs, exam)) > 1:
            texts.append(
                f"{exam}: the runs did not sit the same exam (their masks differ, as "
                "with other data, tokenizer or eval settings), so they do not compare."
            )
    if unplanned := _unplanned(experiment, runs):
        texts.append(f"Runs differ in what no arm sets: {', '.join(unplanned)}.")
    for name, counts in _provenance(runs).items():
        if len(counts) > 1:
            texts.append(f"Not the same in all runs: {name} ({', '.join(counts)}).")
    return texts


def _mask_hashes(runs, exam):
    name = f"eval/mask_hash@{exam.partition('@')[2]}"
    found = [run.curves.values.get(name) for run in runs if run.curves]
    return {int(v) for values in found if values is not None for v in values}
