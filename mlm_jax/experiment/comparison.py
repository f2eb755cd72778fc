"""Arms against the baseline, paired by seed."""

import math

import numpy as np

from mlm_jax.experiment import statistics


def is_less_better(metric):
    return "loss" in metric or "perplexity" in metric


def last_values(finished, exam):
    """Returns {arm: {seed: value}} at the last evaluation. `finished` is {arm: {seed:
    results.Run}}."""
    return {
        name: {
            seed: float(run.curves.values[exam][-1])
            for seed, run in by_seed.items()
            if exam in run.curves.values
        }
        for name, by_seed in finished.items()
    }


def at_equal_flops(experiment, finished):
    """Returns the comparison where each run has done as much arithmetic as the run that
    does the least; None where all do the same to a part in a hundred.

    Between two evaluations the metric is taken to be a straight line.
    """
    curves = [run.curves for by_seed in finished.values() for run in by_seed.values()]
    ends = [float(curve.flops[-1]) for curve in curves]
    if not ends or max(ends) <= 1.01 * min(ends):
        return None
    flops, exam = min(ends), experiment.metric
    values = {
        name: {
            seed: float(np.interp(flops, run.curves.flops, run.curves.values[exam]))
            for seed, run in by_seed.items()
        }
        for name, by_seed in finished.items()
    }
    return {"flops": flops, "rows": compare(experiment, values, exam)}


def at_rungs(experiment, runs):
    """Returns the comparison at each step where halving chose the arms that go on, over
    all runs that came so far."""
    return [
        {"step": rung, "rows": compare(experiment, values, experiment.metric)}
        for rung in experiment.rungs
        if any((values := _values_at(experiment, runs, rung)).values())
    ]


def _values_at(experiment, runs, step):
    values: dict[str, dict[int, float]] = {arm.name: {} for arm in experiment.arms}
    for run in runs:
        if run.curves and step in run.curves.steps:
            found = run.curves.values[experiment.metric][run.curves.steps == step][0]
            if math.isfinite(found):
                values[run.arm][run.seed] = float(found)
    return values


def compare(experiment, values, exam):
    """Returns a row for each arm: its mean, and its paired difference to the baseline,
    with p adjusted for all arms. `values` is {arm: {seed: value}}."""
    baseline = values[experiment.baseline]
    rows = [
        _compare_arm(name, by_seed, baseline, name == experiment.baseline)
        for name, by_seed in values.items()
    ]
    tested = [row for row in rows if not math.isnan(row["p"])]
    if tested:
        holm_A = statistics.holm([row["p"] for row in tested])
        differences_AxS = [
            [row["differences"].get(seed, math.nan) for seed in experiment.seeds]
            for row in tested
        ]
        joint_A = statistics.joint_p(differences_AxS)
        for row, holm, joint in zip(tested, holm_A, joint_A, strict=True):
            row |= {"holm_p": float(holm), "joint_p": float(joint)}
            row["verdict"] = _verdict(row, exam)
    return rows


def _verdict(row, exam):
    if row["joint_p"] > statistics.ALPHA:
        return ""
    is_less = row["difference"]["mean"] < 0
    return "better" if is_less == is_less_better(exam) else "worse"


def _compare_arm(name, by_seed, baseline, is_baseline):
    values = list(by_seed.values())
    pairs = [] if is_baseline else [seed for seed in by_seed if seed in baseline]
    differences = [by_seed[seed] - baseline[seed] for seed in pairs]
    p = statistics.sign_flip_p(differences) if len(pairs) > 1 else math.nan
    return {
        "arm": name,
        "n": len(by_seed),
        "values": by_seed,
        "mean": estimate(values),
        "differences": dict(zip(pairs, differences, strict=True)),
        "difference": estimate(differences),
        "p": float(p),
        "holm_p": math.nan,
        "joint_p": math.nan,
        "detectable": statistics.detectable_difference(differences),
        "verdict": "",
    }


def estimate(values):
    """Returns a `statistics.Estimate` as a dict, None of nothing."""
    return statistics.estimate(values)._asdict() if values else None
