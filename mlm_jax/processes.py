"""Several processes that train one run together, through JAX's own runtime.

    python -m mlm_jax.train --config=… --workdir=… \
        --coordinator=host0:1234 --num_processes=2 --process_id=0

`--distributed` leaves the three to JAX, which knows SLURM, Open MPI, Kubernetes and
cloud TPUs. Each process reads its slice of every batch; the first one writes. All make
the same updates, so that what one decides by a number all decide.

A process that dies, hangs, is cut off or ends by an error of its own takes the others
with it within `END_SECONDS`: JAX's coordination service ends them, non-zero. The same
commands resume.
"""

import math
import signal
import zlib

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax.errors import InputError

START_SECONDS = 300  # how long they wait for each other to start
HEARTBEAT_SECONDS = 30  # who was silent for so long is dead
SHUTDOWN_SECONDS = 45  # how long who ends by an error of its own waits for the others
END_SECONDS = 60

COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, for a run of several processes."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "This one's number, from 0.", 0)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Take the three from the cluster, such as SLURM."
)


def start():
    """Joins the processes of the run, as the flags say; nothing for one alone. Before
    any use of JAX."""
    given = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    if DISTRIBUTED.value or given != (None, None, None):
        join(*given)


def join(coordinator, count, number):
    """Raises InputError for numbers that do not go together, or, where all are None, a
    cluster that JAX does not know."""
    named = {
        "--coordinator": coordinator,
        "--num_processes": count,
        "--process_id": number,
    }
    missing = [name for name, value in named.items() if value is None]
    if missing and len(missing) < len(named):
        raise InputError(f"{' and '.join(missing)} must be given too.")
    if not missing and number >= count:
        raise InputError(f"--process_id={number}; expected 0 to {count - 1}.")
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            number,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:  # no cluster was found
        raise InputError(f"--distributed: {error}") from error


def is_first():
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def check(c, sizes):
    """Raises InputError for a config that the processes there are cannot run on a mesh
    of {axis: size}."""
    count = jax.process_count()
    if count == 1:
        return
    if c.parallel.mode == "pmap":
        raise InputError(
            f"config.parallel.mode = pmap is for one process, and there are {count}; "
            "use shard_map."
        )
    if jax.local_device_count() % sizes["tensor"]:
        raise InputError(
            f"config.parallel.mesh.tensor = {sizes['tensor']} must divide the "
            f"{jax.local_device_count()} device(s) of a process."
        )
    if math.prod(sizes.values()) != jax.device_count():
        raise InputError(
            f"config.parallel.mesh has {math.prod(sizes.values())} device(s); "
            f"{count} processes must use all {jax.device_count()} that they have."
        )


def agree(name, value):
    """Raises InputError where processes differ in what they must have in common, or
    they would train on different things, or wait for each other for ever, later."""
    if jax.process_count() == 1:
        return
    ours = zlib.crc32(str(value).encode())
    if len(set(multihost_utils.process_allgather(np.uint32(ours)).tolist())) > 1:
        raise InputError(
            f"{name} differs between processes; all need the same command and files."
        )


def wait_for_all(name):
    """Returns when every process has come here."""
    if jax.process_count() > 1:
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
    """Returns the tree with every leaf readable by this process. To be called by all.

    What is spread over processes comes leaf by leaf to the host, since all of a state
    in parts may have no room on one device."""
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def whole_leaf(leaf):
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return jax.device_get(gather(leaf))

    return jax.tree.map(whole_leaf, tree)


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
