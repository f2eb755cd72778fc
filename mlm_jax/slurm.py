"""The jobs that SLURM runs: commands, submitted again when their time ends.

submitit writes the job to a file of its own and reads it back on the node; nothing of
that is read here.
"""

import os
import signal
import subprocess

import submitit
from submitit.core.utils import DelayedSubmission

MAX_RESTARTS = 1000


class Command:
    """A command that goes on where it stopped when it is started again.

    SLURM signals all processes of a task. SIGTERM, when a job is cancelled or
    preempted, makes training save and end. SIGUSR2, before the job's time ends, is for
    submitit, which calls `checkpoint` in the first task (JAX tells the others), and
    puts the job back into the queue.
    """

    def __init__(self, command: list[str], cwd: str):
        self.command, self.cwd = command, cwd

    def __call__(self) -> None:
        with subprocess.Popen(
            self.command,
            cwd=self.cwd,
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        ) as process:
            self.pid = process.pid
            code = process.wait()
        if code:
            raise subprocess.CalledProcessError(code, self.command)

    def checkpoint(self) -> DelayedSubmission:
        os.kill(self.pid, signal.SIGTERM)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it saves
        return DelayedSubmission(Command(self.command, self.cwd))


def submit(command, *, folder, cwd, parameters):
    """Submits `command`, a list, to run in each task. Returns the job's id and log.

    Raises RuntimeError or OSError if there is no SLURM, or if it refuses.
    """
    executor = submitit.SlurmExecutor(folder, max_num_timeout=MAX_RESTARTS)
    executor.update_parameters(**parameters)
    job = executor.submit(Command(command, cwd))
    return job.job_id, job.paths.stdout


def submit_array(commands, *, folder, cwd, parameters):
    """Submits a job array, one task a command. Returns its id."""
    executor = submitit.SlurmExecutor(folder, max_num_timeout=MAX_RESTARTS)
    executor.update_parameters(**parameters)
    with executor.batch():
        jobs = [executor.submit(Command(command, cwd)) for command in commands]
    return jobs[0].job_id.partition("_")[0]
