"""A SLURM of one node in a folder of its own, from Debian's packages.

apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
"""

import contextlib
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Returns the programs that are not installed; empty where a test can run."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


@contextlib.contextmanager
def running(folder):
    """Starts the daemons; yields the environment for commands to find them by."""
    folder = pathlib.Path(folder)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONFIG.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            folder=folder,
            ports=[free_port(), free_port()],
        )
    )
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    environment = os.environ | {"SLURM_CONF": str(conf), "PATH": path}
    munged = ["munged", "-F", "--force", f"--key-file={folder}/key"]
    munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munged += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    with contextlib.ExitStack() as stack:
        for command in munged, ["slurmctld", "-D"], ["slurmd", "-D"]:
            daemon = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        deadline = time.monotonic() + 60
        while run(environment, "sinfo", "-h", "-o", "%t").strip() != "idle":
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.3)
        yield environment


def run(environment, *command):
    """Returns what the command prints, or nothing where it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
