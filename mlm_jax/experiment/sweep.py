"""Experiment files: a question, its arms and its seeds.

    \"\"\"Does hiding more than 15% help, at an equal number of steps?\"\"\"

    from mlm_jax.experiment.sweep import values

    CONFIG = "configs/tiny.py"
    ARMS = values("corruption.rate", 0.15, 0.3, 0.45)
    SEEDS = range(6)
    BASELINE = "rate=0.15"
    METRIC = "eval/loss@0.15"  # the exam is the same for every arm

and, where they are wanted, fields that all arms have, and others for a small variant,
which `FILE:small` runs:

    SETTINGS = {"eval.rates": (0.15, 0.4)}
    SMALL = {"optim.num_steps": 200}

Every arm is run once for each seed. A seed sets initial weights, order of rows and
masks, so arms of one seed meet the same rows and, at different rates, nested masks:
their differences are compared pair by pair. `PAIRED = False` gives each run its own.

Arms may be branches: `TRUNK = {"optim.num_steps": 400}` trains a run with these
settings for each seed first, and every arm goes on from its last step.

`RUNGS = (100, 200)` halves the arms on the way: at each of these steps the better half
by METRIC, in the mean over seeds, goes on (successive halving, Jamieson & Talwalkar
2016); `KEEP` is another share than one half.
"""

import hashlib
import importlib.util
import itertools
import json
import pathlib
import re
import types
from typing import Any, NamedTuple

from mlm_jax import command, config
from mlm_jax.errors import InputError


class Arm(NamedTuple):
    """`name` is a directory's; `settings` are what differs from the other arms."""

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
    base: dict[str, Any]  # what all arms have in place of the config's
    is_paired: bool = True
    trunk: dict[str, Any] | None = None
    rungs: tuple[int, ...] = ()
    keep: float = 0.5


# ---- the algebra of arms ------------------------------------------------------------


def arm(name, **settings):
    """One arm; fields are written with __ for the dot: corruption__rate=0.4."""
    return (Arm(name, {n.replace("__", "."): v for n, v in settings.items()}),)


def values(field, *options, label=None):
    """An arm for each value of a field."""
    label = label or field.rpartition(".")[2]
    return tuple(Arm(f"{label}={_text(value)}", {field: value}) for value in options)


def product(*sweeps):
    """Every arm of one with every arm of the others; the last changes fastest."""
    return tuple(_joined(arms) for arms in itertools.product(*sweeps))


def zipped(*sweeps):
    """The first arm of each together, then the second, …; all are equally long."""
    return tuple(_joined(arms) for arms in zip(*sweeps, strict=True))


def chain(*sweeps):
    """One after the other."""
    return tuple(itertools.chain(*sweeps))


def _joined(arms):
    settings: dict[str, Any] = {}
    for each in arms:
        settings |= each.settings
    return Arm(",".join(each.name for each in arms), settings)


def _text(value):
    if isinstance(value, tuple):
        return "-".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_")


# ---- files --------------------------------------------------------------------------

REQUIRED = ("CONFIG", "ARMS", "SEEDS", "BASELINE", "METRIC")
OPTIONAL = ("SETTINGS", "SMALL", "PAIRED", "TRUNK", "RUNGS", "KEEP")
TRUNK = "trunk"  # the directory of its runs
NAME = re.compile(r"[^/\0\s]([^/\0]{0,150}[^/\0\s])?")


def load(spec):
    """Returns the experiment of `FILE` or `FILE:small`.

    Raises InputError, naming what is wrong.
    """
    path, _, variant = spec.partition(":")
    if variant not in ("", "small"):
        raise InputError(f"{spec}: no variant {variant!r}; there is {path}:small.")
    module = _module(pathlib.Path(path))
    found = vars(module)
    missing = [name for name in REQUIRED if name not in found]
    if missing or not module.__doc__:
        raise InputError(f"{path}: {', '.join(missing) or 'the question'} is missing.")
    if variant and "SMALL" not in found:
        raise InputError(f"{path} has no small variant: SMALL = {{…}} is missing.")
    base = found.get("SETTINGS", {}) | (found["SMALL"] if variant else {})
    experiment = Experiment(
        name=pathlib.Path(path).stem + ("_small" if variant else ""),
        question=module.__doc__.strip(),
        config=found["CONFIG"],
        arms=tuple(found["ARMS"]),
        seeds=tuple(found["SEEDS"]),
        baseline=found["BASELINE"],
        metric=found["METRIC"],
        base=base,
        is_paired=found.get("PAIRED", True),
        trunk=found.get("TRUNK"),
        rungs=tuple(found.get("RUNGS", ())),
        keep=found.get("KEEP", 0.5),
    )
    _check(path, experiment)
    return experiment


def _module(path):
    """Runs the file, which is the user's own as a config is."""
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    name = f"experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is Python, so anything can be wrong with it
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error
    unknown = [
        name
        for name, value in vars(module).items()
        if name.isupper()
        and name not in REQUIRED + OPTIONAL
        and not isinstance(value, types.ModuleType)
    ]
    for name in unknown:
        command.check_field(name, REQUIRED + OPTIONAL, "")
    return module


def _check(path, experiment):
    names = [each.name for each in experiment.arms]
    for name in names:
        if not NAME.fullmatch(name) or name in (".", "..", "report", TRUNK):
            raise InputError(f"{path}: arm {name!r} cannot name a directory.")
        if names.count(name) > 1:
            raise InputError(f"{path}: two arms are named {name!r}.")
    if not experiment.arms or not experiment.seeds:
        raise InputError(f"{path}: there is no arm, or no seed.")
    if len(set(experiment.seeds)) < len(experiment.seeds):
        raise InputError(f"{path}: SEEDS has a seed twice.")
    command.check_field(experiment.baseline, names, "BASELINE = ")
    if list(experiment.rungs) != sorted(set(experiment.rungs)):
        raise InputError(f"{path}: RUNGS = {experiment.rungs}; expected rising steps.")
    if not 0 < experiment.keep < 1:
        raise InputError(f"{path}: KEEP = {experiment.keep}; expected a share below 1.")


# ---- runs ---------------------------------------------------------------------------


class Run(NamedTuple):
    """An arm with a seed: an ordinary run in an ordinary directory."""

    arm: Arm
    seed: int
    config: Any
    directory: pathlib.Path

    @property
    def name(self):
        return f"{self.arm.name} seed {self.seed}"


def runs(experiment, directory):
    """Returns all runs, their configs checked: those of the first seed first.

    Raises InputError, naming arm and field, for a config that cannot be used.
    """
    found = _runs(experiment, experiment.arms, directory)
    rates = {f"eval/loss@{rate:g}" for run in found for rate in run.config.eval.rates}
    command.check_field(experiment.metric, sorted(rates), "METRIC = ")
    return found


def trunk_runs(experiment, directory):
    """Returns the runs that the arms are branches of, in the order of the seeds."""
    if experiment.trunk is None:
        return []
    return _runs(experiment, (Arm(TRUNK, experiment.trunk),), directory)


def _runs(experiment, arms, directory):
    base = command.load_config(experiment.config)
    return [
        Run(
            each,
            seed,
            _config_of(experiment, base, each, seed),
            pathlib.Path(directory) / each.name / f"seed{seed}",
        )
        for seed in experiment.seeds
        for each in arms
    ]


def _config_of(experiment, base, each, seed):
    c = base.copy_and_resolve_references()
    fields = list(config.flatten(c))
    if not experiment.is_paired:
        name = f"{each.name} {seed}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:4])
    settings = experiment.base | each.settings | {"seed": seed}
    # Sentences are filled at the end of a run that someone watches.
    c.eval.fill_mask = ()
    for field, value in settings.items():
        command.check_field(field, fields, f"arm {each.name}: ")
        try:
            c.update_from_flattened_dict({field: value})
        except TypeError as error:
            raise InputError(
                f"arm {each.name}: {field} = {value!r}; {str(error).splitlines()[0]}"
            ) from error
    try:
        config.check(c)
    except InputError as error:
        raise InputError(f"arm {each.name}: {error}") from error
    return c


# ---- which runs share a program -----------------------------------------------------

# Of a step's arithmetic: what a run may spend on prediction slots of the largest rate
# in its group before it is given a program of its own.
MAX_WASTE = 0.1


def groups(found, cost):
    """Returns lists of runs that one compiled program can train.

    They differ only in numbers that a step traces (`config.TRACED`), and in the number
    of prediction slots by so little that the empty ones cost at most MAX_WASTE.
    `cost(config, num_slots=None)` is the arithmetic of a step, by default with the
    slots of the config itself, given as (slots, arithmetic).
    """
    by_shape: dict[str, list[Run]] = {}
    for run in found:
        by_shape.setdefault(shape_of(run.config), []).append(run)
    result = []
    for same in by_shape.values():
        sized = sorted(same, key=lambda run: cost(run.config)[0], reverse=True)
        current: list[Run] = []
        for run in sized:
            if current:
                num_slots, _ = cost(current[0].config)
                _, alone = cost(run.config)
                _, shared = cost(run.config, num_slots)
                if shared > (1 + MAX_WASTE) * alone:
                    result.append(current)
                    current = []
            current.append(run)
        result.append(current)
    return result


def shape_of(c):
    """Returns all of a config that a compiled program depends on, as text."""
    fixed = {
        name: value
        for name, value in config.flatten(c).items()
        if name not in config.TRACED
    }
    return json.dumps(fixed, sort_keys=True, default=str)
