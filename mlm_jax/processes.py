"""Several processes that train one run together, through JAX's own runtime.

    python -m mlm_jax.train --config=… --workdir=… \
        --coordinator=host0:1234 --num_processes=2 --process_id=0

`--distributed` leaves the three to JAX, which knows SLURM, Open MPI, Kubernetes and
cloud TPUs. Each process reads its slice of every batch; the first one writes. All make
the same updates, so that what one decides by a number all decide.

A process that dies or is cut off takes the others with it within
`HEARTBEAT_SECONDS` and a little: JAX's coordination service ends them, non-zero.
"""

import contextlib
import signal

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax.errors import InputError

# The coordinator declares dead who was silent for so long.
HEARTBEAT_SECONDS = 100
# How long processes wait for each other at the start, and at the end for the slowest.
START_SECONDS = 300

COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, for a run of several processes."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "This one's number, from 0.", 0)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Take the three from the cluster, such as SLURM."
)


def start():
    """Joins the processes of the run, as the flags say; nothing for one alone.

    Before any use of JAX. Raises InputError for flags that do not go together, or a
    cluster that JAX does not know.
    """
    count, number = NUM_PROCESSES.value, PROCESS_ID.value
    given = {
        "--coordinator": COORDINATOR.value,
        "--num_processes": count,
        "--process_id": number,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise InputError(f"{' and '.join(missing)} must be given too.")
    if missing and not DISTRIBUTED.value:
        return
    if count is not None and number is not None and number >= count:
        raise InputError(f"--process_id={number}; expected 0 to {count - 1}.")
    try:
        jax.distributed.initialize(
            COORDINATOR.value,
            count,
            number,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=START_SECONDS,
        )
    except ValueError as error:  # no cluster was found
        raise InputError(f"--distributed: {error}") from error


def is_first():
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def check(c):
    """Raises InputError for a config that the processes there are cannot run."""
    count = jax.process_count()
    if count == 1:
        return
    if c.parallel.mode == "pmap":
        raise InputError(
            f"config.parallel.mode = pmap is for one process, and there are {count}; "
            "use shard_map."
        )
    if jax.local_device_count() % c.parallel.mesh.tensor:
        raise InputError(
            f"config.parallel.mesh.tensor = {c.parallel.mesh.tensor} must divide the "
            f"{jax.local_device_count()} device(s) of a process."
        )


def agree(name, value):
    """Raises InputError where processes differ in an integer, such as the number of
    rows: they would wait for each other for ever, later."""
    if jax.process_count() == 1:
        return
    values = multihost_utils.process_allgather(value).tolist()
    if len(set(values)) > 1:
        raise InputError(
            f"{name} differs between processes: {values}. Do all read the same files?"
        )


@contextlib.contextmanager
def first_alone(name):
    """The first process does what is inside, then all the others: files are made once,
    and then found."""
    several = jax.process_count() > 1
    if several and not is_first():
        multihost_utils.sync_global_devices(name)
    yield
    if several and is_first():
        multihost_utils.sync_global_devices(name)


def from_slices(batch, sharding):
    """Returns the batch of all processes, each of which has its slice of the rows:
    global arrays [B, …] from local ones [B / processes, …]."""
    if jax.process_count() == 1:
        return batch
    return {
        name: jax.make_array_from_process_local_data(sharding, local)
        for name, local in batch.items()
    }


def from_whole(batch, sharding):
    """Returns global arrays of a batch that every process has whole."""
    if jax.process_count() == 1:
        return batch
    return {
        name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        for name, x in batch.items()
    }


def key(seed, mesh):
    """Returns `jax.random.key(seed)`, on every device of the mesh."""
    if jax.process_count() == 1:
        return jax.random.key(seed)
    return jax.jit(jax.random.key, out_shardings=NamedSharding(mesh, P()))(
        np.uint32(seed)
    )


def whole(tree, mesh):
    """Returns global arrays with all of each on every device, for a host to read."""
    if jax.process_count() == 1:
        return tree
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)


class StopSignal:
    """SIGTERM or SIGINT, turned into a flag that the loop reads between two steps.

    Of several processes all see it at the same step, whichever was signalled: JAX's
    preemption service, which has SIGTERM, tells the others. Once asked, further signals
    change nothing until the process has ended.
    """

    def __init__(self):
        self.asked = None
        self._previous = {}

    def __enter__(self):
        if jax.process_count() == 1:
            self._previous = {
                number: signal.signal(number, self._ask)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *exc_info):
        for number, handler in self._previous.items():
            # Python gives its own handlers up before the process has ended.
            signal.signal(number, signal.SIG_IGN if self.asked else handler)

    def look(self, step):
        """Asks the other processes; to be called by all before each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(
            step
        ):
            self.asked = "SIGTERM"

    def _ask(self, number, frame):
        del frame
        self.asked = signal.Signals(number).name
