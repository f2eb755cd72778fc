"""Successive halving: which arms go on (Jamieson & Talwalkar 2016).

A function of what the runs have logged, so that it needs no memory of its own.
"""

import math

from mlm_jax import metrics


def survivors(experiment, runs, until):
    """Returns the arms that go on beyond the rungs before step `until`: at each rung
    the best, by the mean over seeds of the metric at that step.

    An arm of which a run has no finite value there is out.
    """
    alive = list(experiment.arms)
    for rung in (rung for rung in experiment.rungs if rung < until):
        scores = {each.name: _score(experiment, runs, each, rung) for each in alive}
        alive.sort(key=lambda each: scores[each.name])
        kept = alive[: math.ceil(experiment.keep * len(alive))]
        alive = [each for each in kept if scores[each.name] < math.inf]
    return tuple(each for each in experiment.arms if each in alive)


def _score(experiment, runs, each, rung):
    values = [
        _value(run, experiment.metric, rung)
        for run in runs
        if run.arm.name == each.name
    ]
    return sum(values) / len(values)


def _value(run, metric, step):
    path = run.directory / "metrics.jsonl"
    if not path.exists():
        return math.inf
    for line in metrics.read_json_lines(path):
        if line["step"] == step and line.get(metric) is not None:
            return line[metric]
    return math.inf
