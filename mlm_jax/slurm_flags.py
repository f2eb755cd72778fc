"""The flags of commands that submit to SLURM, and how they do it."""

import contextlib
import pathlib

from absl import flags

from mlm_jax.errors import InputError

SLURM = flags.DEFINE_boolean("slurm", False, "Submit to SLURM, instead of here.")
NODES = flags.DEFINE_integer("slurm_nodes", 1, "Nodes.", lower_bound=1)
TASKS = flags.DEFINE_integer(
    "slurm_tasks_per_node", 1, "Processes on each node.", lower_bound=1
)
GPUS = flags.DEFINE_integer("slurm_gpus_per_node", None, "GPUs of each node.", 0)
CPUS = flags.DEFINE_integer("slurm_cpus_per_task", None, "Cores of each process.", 1)
MEMORY = flags.DEFINE_string("slurm_mem", None, "Memory of each node, such as 64GB.")
MINUTES = flags.DEFINE_integer(
    "slurm_minutes", 60, "Time of the job; it saves 90 seconds before.", lower_bound=3
)
PARTITION = flags.DEFINE_string("slurm_partition", None, "Partition to run in.")
OPTIONS = flags.DEFINE_list(
    "slurm_options", [], "More of sbatch's: account=me,constraint=a100."
)


def others(argv):
    """Returns what of a command line is not for SLURM. Raises InputError for a flag of
    ours that has its value in the next argument."""
    arguments = []
    for argument in argv:
        name, equals, _ = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name.startswith("slurm"):
            arguments.append(argument)
        elif not equals and name != SLURM.name:
            raise InputError(f"write --{name}=VALUE, with =.")
    return arguments


def parameters(name):
    """Returns sbatch's, by the flags."""
    more = dict(option.partition("=")[::2] for option in OPTIONS.value)
    found = {
        "job_name": name,
        "nodes": NODES.value,
        "ntasks_per_node": TASKS.value,
        "gpus_per_node": GPUS.value,
        "cpus_per_task": CPUS.value,
        "mem": MEMORY.value,
        "time": MINUTES.value,
        "partition": PARTITION.value,
        "additional_parameters": more or None,
    }
    return {name: value for name, value in found.items() if value is not None}


@contextlib.contextmanager
def submitting(workdir):
    """Gives the module `slurm` and the folder of the job's logs. Raises InputError if
    submitit is not there, if there is no cluster, or if it refuses the job."""
    try:
        from mlm_jax import slurm
    except ImportError as error:
        raise InputError(
            f"submitit is not there ({error}): pip install 'mlm_jax[slurm]'"
        ) from error
    folder = pathlib.Path(workdir).absolute() / "slurm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield slurm, folder
    except (OSError, RuntimeError) as error:  # no cluster, or it does not like the job
        reason = str(error).strip().split("\n")[-1]
        raise InputError(f"SLURM did not take the job: {reason}") from error
