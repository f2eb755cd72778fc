"""Submits training to SLURM, over one node or many.

    python -m mlm_jax.launch --slurm --slurm_nodes=4 --slurm_gpus_per_node=8 \\
        --slurm_partition=gpu --slurm_minutes=1440 \\
        --config=configs/bert_base.py --workdir=runs/bert_base \\
        --config.parallel.mode=shard_map

Whatever is not `--slurm…` goes to `python -m mlm_jax.train`, which each task runs from
the directory that this was called in; more than one task are one run together
(`--distributed`). A job that is preempted, or whose time ends, saves, goes back to the
queue and resumes. Needs submitit (pip install 'mlm_jax[slurm]') and its logs are in
WORKDIR/slurm.
"""

import os
import pathlib
import sys

from absl import flags

from mlm_jax import command, config, train
from mlm_jax.errors import InputError

SLURM = flags.DEFINE_boolean("slurm", False, "Launch on SLURM.")
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


def train_arguments(argv):
    """Returns what of the command line is for training. Raises InputError for a flag
    of ours that has its value in the next argument."""
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


def main(arguments):
    del arguments
    if not SLURM.value:
        raise InputError("--slurm is missing: SLURM is what this launches on.")
    c = train.CONFIG.value
    config.check(c)
    num_tasks = NODES.value * TASKS.value
    if num_tasks > 1 and c.parallel.mode == "pmap":
        raise InputError(
            f"config.parallel.mode = pmap is for one process, and there are {num_tasks}"
            "; expected shard_map or jit."
        )
    try:
        from mlm_jax import slurm
    except ImportError as error:
        raise InputError(
            f"submitit is not there ({error}): pip install 'mlm_jax[slurm]'"
        ) from error
    folder = pathlib.Path(train.WORKDIR.value).absolute() / "slurm"
    training = [sys.executable, "-m", "mlm_jax.train", *train_arguments(sys.argv[1:])]
    training += ["--distributed"] * (num_tasks > 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        job, log = slurm.submit(
            training,
            folder=folder,
            cwd=os.getcwd(),
            parameters=parameters(folder.parent.name),
        )
    except (OSError, RuntimeError) as error:  # no cluster, or it does not like the job
        reason = str(error).strip().split("\n")[-1]
        raise InputError(f"SLURM did not take the job: {reason}") from error
    print(f"job {job}: see {log}; scancel {job} ends it.")


if __name__ == "__main__":
    command.run(main)
