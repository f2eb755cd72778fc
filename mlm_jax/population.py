"""Several runs of one shape as one program: their states stacked, the step `vmap`ped.

The runs differ in numbers that a step traces, and in their seeds. Each is spread over
no more than one device, and keeps to its own directory, so that it may be resumed,
evaluated and used like any other run, or in another company.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax.errors import NonFiniteError, Preempted


class Step(NamedTuple):
    """`update(states, batches) -> (states, metrics)` of `num_runs` runs, everything
    stacked and placed by `sharding`; the states passed in are donated."""

    num_runs: int
    sharding: NamedSharding
    update: Callable


def make_step(step, num_runs):
    """Returns the `Step` of `step`, which is that of one run on one device.

    Runs are spread evenly over as many devices as divide their number.
    """
    devices = jax.local_devices()
    count = max(n for n in range(1, len(devices) + 1) if num_runs % n == 0)
    mesh = Mesh(np.asarray(devices[:count]), ("runs",))
    mapped = jax.shard_map(
        jax.vmap(step),
        mesh=mesh,
        in_specs=P("runs"),
        out_specs=P("runs"),
        check_vma=False,  # each device has its own runs, and they share nothing
    )
    sharding = NamedSharding(mesh, P("runs"))
    return Step(num_runs, sharding, jax.jit(mapped, donate_argnums=0))


def drive(trainings, step, stop):
    """Makes the updates of all `trainings` together, at most as many as `step` has
    places.

    Returns {index: NonFiniteError} of those that had to stop; the others go on without
    them. Raises Preempted when all have been saved.
    """
    population = _Population(trainings, step)
    batches = _Batches(trainings)
    updates = {
        i: training.updates(batches.of(i), stop) for i, training in enumerate(trainings)
    }
    failed: dict[int, NonFiniteError] = {}
    preempted: list[Preempted] = []
    latest = dict.fromkeys(updates)  # what each is to be sent: first of all, nothing
    batch_of: dict[int, dict] = {}
    while updates:
        for i in list(updates):
            try:
                batch_of[i] = updates[i].send(latest[i])
            except StopIteration:
                del updates[i]
            except NonFiniteError as error:
                failed[i] = error
                del updates[i]
            except Preempted as error:
                preempted.append(error)
                del updates[i]
        if updates:
            latest = population.update(batch_of)
    if preempted:
        raise preempted[0]
    return failed


class _Population:
    """The stacked states. A place without a run, or whose run has ended, goes on with
    what it had, and no one looks."""

    def __init__(self, trainings, step):
        self._step = step
        states = [training.get_state() for training in trainings]
        self._shardings = jax.tree.map(lambda x: x.sharding, states[0])
        states += [states[0]] * (step.num_runs - len(states))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
        self._states = jax.device_put(stacked, step.sharding)
        for i, training in enumerate(trainings):
            training.get_state = functools.partial(self._state, i)

    def _state(self, i):
        state = jax.tree.map(lambda x: x[i], self._states)
        return jax.device_put(state, self._shardings)

    def update(self, batch_of):
        """Returns {run: a function that fetches its metrics}."""
        some = next(iter(batch_of.values()))
        rows = [batch_of.get(i, some) for i in range(self._step.num_runs)]
        batches = {name: np.stack([row[name] for row in rows]) for name in some}
        self._states, metrics = self._step.update(self._states, batches)
        fetch = functools.cache(functools.partial(jax.device_get, metrics))

        def fetch_of(i):
            return {name: leaf[i] for name, leaf in fetch().items()}

        return {i: functools.partial(fetch_of, i) for i in batch_of}


class _Batches:
    """The rows of every run; runs of one seed read them once."""

    def __init__(self, trainings):
        self._sources = [training.batches() for training in trainings]
        self._seeds = [training.c.seed for training in trainings]
        self._starts = [training.start or 0 for training in trainings]
        self._read = functools.lru_cache(maxsize=2 * len(set(self._seeds)))(self._at)
        self._source_of = dict(zip(self._seeds, self._sources, strict=True))

    def of(self, i):
        k = self._starts[i]
        while True:
            yield self._read(self._seeds[i], k)
            k += 1

    def _at(self, seed, k):
        return self._source_of[seed][k]
