"""The best rate of each group of arms, and how it changes with the model's size."""

import collections
from typing import Any, NamedTuple

import numpy as np

from mlm_jax.experiment import statistics

RATE = "corruption.rate"


class Group(NamedTuple):
    """Arms that differ in nothing but their rate, in order of it, as far as they have
    finished with some seed."""

    name: str
    size: int  # parameters in the layers' matrices
    rates: list[float]
    runs: list[dict[int, Any]]  # of each rate: {seed: results.Run}

    def seeds(self):
        """Returns those that have finished at every rate."""
        return [s for s in self.runs[0] if all(s in by_seed for by_seed in self.runs)]

    def losses(self, exam, seeds):
        """Returns float[R, S]."""
        return np.array(
            [
                [by_seed[s].curves.values[exam][-1] for s in seeds]
                for by_seed in self.runs
            ]
        )


def find_groups(experiment, finished):
    """Returns the groups of two arms or more. `finished` is {arm: {seed: Run}}."""
    members = collections.defaultdict(list)
    for arm in experiment.arms:
        if RATE in arm.settings and finished[arm.name]:
            others = {n: v for n, v in arm.settings.items() if n != RATE}
            name = ", ".join(f"{n.rsplit('.')[-1]}={v}" for n, v in others.items())
            members[name].append((arm.settings[RATE], finished[arm.name]))
    groups = []
    for name, pairs in members.items():
        if len(pairs) > 1:
            rates, runs = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
            size = _size(next(iter(runs[0].values())).config)
            groups.append(Group(name, size, list(rates), list(runs)))
    return groups


def _size(c):
    width, mlp_width = c["model.width"], c["model.mlp_width"]
    num_matrices = 3 if c["model.gated"] else 2
    return c["model.num_layers"] * (4 * width**2 + num_matrices * width * mlp_width)


def fit_group(group, exam):
    """Returns a row: the losses and the fitted optimum, or why there is none."""
    seeds = group.seeds()
    row = {"group": group.name, "exam": exam, "size": group.size, "rates": group.rates}
    if not seeds:
        return row | {"n": 0, "refused": "No seed has finished at every rate."}
    losses_RxS = group.losses(exam, seeds)
    row |= {"n": len(seeds), "losses": losses_RxS.tolist()}
    try:
        return row | statistics.fit_optimum(group.rates, losses_RxS)._asdict()
    except statistics.NoOptimumError as error:
        return row | {"refused": str(error)}


def fit_trend(groups, rows, exam):
    """Returns the trend over the groups whose row has an optimum, or why it is not
    known; None where all have one size."""
    if len({group.size for group in groups}) < 2:
        return None
    known = [g for g, row in zip(groups, rows, strict=True) if "refused" not in row]
    sizes = [group.size for group in known]
    seeds = sorted(set.intersection(*(set(group.seeds()) for group in known or groups)))
    if not seeds:
        return {"sizes": sizes, "refused": "No seed has finished in all sizes."}
    losses = [group.losses(exam, seeds) for group in known]
    try:
        trend = statistics.fit_trend(sizes, [group.rates for group in known], losses)
        return {"sizes": sizes, "n": len(seeds)} | trend._asdict()
    except statistics.NoOptimumError as error:
        return {"sizes": sizes, "refused": str(error)}
