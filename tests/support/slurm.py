"""Run a real Slurm with two nodes on this machine, under the user of the tests, without accounting."""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "salloc", "srun", "scancel", "scontrol", "squeue", "sinfo")
PACKAGES = "apt-get install --no-install-recommends slurmd slurmctld slurm-client munge"
NODES = ("node1", "node2")
FIRST_PORT = 20000 + os.getpid() % 4000 * 3
"""First of three ports; another run of the tests at the same time has other ports."""
UP_S = 30
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
NodeName=DEFAULT CPUs=2 RealMemory=1000 Gres=gpu:{gpus}
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}]
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GPUS = 8
"""GPUs of a node. Slurm assigns them, but they are null devices that no process can use as a GPU."""


def missing_requirement():
    """Return why no Slurm can be started here, or None if it can."""
    missing = [command for command in (*DAEMONS, *CLIENTS) if shutil.which(command, path=SBIN) is None]
    if missing:
        return f"{missing[0]} is not installed ({PACKAGES})"
    return None if os.getuid() == 0 else "slurmd needs root"


class Slurm:
    """Slurm of two nodes on this machine, with its commands."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}

    def up(self):
        """Start Slurm; return once both nodes accept jobs."""
        key = self.folder / "munge" / "key"
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o700)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host, user = os.uname().nodename.partition(".")[0], "root"
        names = {"host": host, "user": user, "folder": self.folder, "port": FIRST_PORT, "gpus": GPUS}
        ports = {"first": FIRST_PORT + 1, "last": FIRST_PORT + len(NODES)}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**names, **ports))
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR, Path(os.devnull).stat().st_rdev)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        self.run(
            "munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock",
            f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge/seed",
        )  # fmt: skip
        self.run("slurmctld", "-c")
        for node in NODES:
            self.run("slurmd", "-c", "-N", node)
        until_s = time.monotonic() + UP_S
        while self.run("sinfo", "-N", "-h", "-o", "%t").split() != ["idle"] * len(NODES):
            assert time.monotonic() < until_s, f"Slurm did not come up: {self.run('sinfo', '-N', '-l')}"
            time.sleep(0.1)

    def down(self):
        """End Slurm and all that it runs, also steps that an interrupted test has left."""
        alive = [process for process in psutil.process_iter() if self._owns(process)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            _, alive = psutil.wait_procs(alive, timeout=5)

    def _owns(self, process):
        """Return whether a process has inherited the configuration of this Slurm."""
        with suppress(psutil.Error):
            return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
        return False

    def run(self, *words, **keywords):
        """Run a command that must succeed, and return its output."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, **keywords
        )
        assert done.returncode == 0, f"{words[0]}: {done.stderr}"
        return done.stdout

    def job(self, number):
        """Return Slurm's description of a job, by Slurm's names."""
        output = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.partition("=")[::2] for word in output.split())

    def wait_for(self, number, within_s):
        """Wait until a job and its last process have ended; return its description."""
        until_s = time.monotonic() + within_s
        while (job := self.job(number))["JobState"] not in OVER or self.run("squeue", "-h"):
            assert time.monotonic() < until_s, f"still {job['JobState']}"
            time.sleep(0.2)
        return job


@contextmanager
def slurm():
    """Yield a running Slurm; skip the test if none can be started."""
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because the path of a socket must be short
    folder.chmod(0o755)
    started = Slurm(folder)
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(folder, ignore_errors=True)
