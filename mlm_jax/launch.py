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
import sys

from mlm_jax import command, config, slurm_flags, train
from mlm_jax.errors import InputError


def main(arguments):
    del arguments
    if not slurm_flags.SLURM.value:
        raise InputError("--slurm is missing: SLURM is what this launches on.")
    c = train.CONFIG.value
    config.check(c)
    num_tasks = slurm_flags.NODES.value * slurm_flags.TASKS.value
    if num_tasks > 1 and c.parallel.mode == "pmap":
        raise InputError(
            f"config.parallel.mode = pmap is for one process, and there are {num_tasks}"
            "; expected shard_map or jit."
        )
    training = [sys.executable, "-m", "mlm_jax.train"]
    training += slurm_flags.others(sys.argv[1:])
    training += ["--distributed"] * (num_tasks > 1)
    with slurm_flags.submitting(train.WORKDIR.value) as (slurm, folder):
        job, log = slurm.submit(
            training,
            folder=folder,
            cwd=os.getcwd(),
            parameters=slurm_flags.parameters(folder.parent.name),
        )
    print(f"job {job}: see {log}; scancel {job} ends it.")


if __name__ == "__main__":
    command.run(main)
