"""An experiment file: a question, a config, arms, seeds, a baseline and a metric."""

import importlib.util
import pathlib
from typing import Any, NamedTuple

from mlm_jax.errors import InputError


class Arm(NamedTuple):
    name: str
    settings: dict[str, Any]


class Experiment(NamedTuple):
    name: str
    question: str
    config: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    baseline: str
    metric: str
    base: dict


def load(path):
    """Returns the Experiment of a file. Raises InputError."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Experiment(
        name=path.stem,
        question=(module.__doc__ or "").strip(),
        config=module.CONFIG,
        arms=tuple(module.ARMS),
        seeds=tuple(module.SEEDS),
        baseline=module.BASELINE,
        metric=module.METRIC,
        base=dict(module.BASE),
    )
