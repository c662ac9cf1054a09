"""A real Slurm of two nodes on this machine, started for tests by whoever runs them; no accounting."""

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
"""Others who run these tests beside us have another."""
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
"""A node, by devices that are none: Slurm hands them out, and no process can use one."""


def why_not():
    """Why no Slurm can be started here; None where one can."""
    missing = [each for each in (*DAEMONS, *CLIENTS) if shutil.which(each, path=SBIN) is None]
    if missing:
        return f"{missing[0]} is not installed ({PACKAGES})"
    return None if os.getuid() == 0 else "slurmd needs root"


class Slurm:
    """Two nodes that share this machine, and its commands."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SBIN}

    def up(self):
        """Start it; returns once both nodes take jobs."""
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
        """End it and what it runs, also steps that an interrupted test left."""
        found = [each for each in psutil.process_iter() if self._started(each)]
        for signalled in (psutil.Process.terminate, psutil.Process.kill):
            for each in found:
                with suppress(psutil.NoSuchProcess):
                    signalled(each)
            _, found = psutil.wait_procs(found, timeout=5)

    def _started(self, process):
        """Whether it has this Slurm's configuration from whoever started it."""
        with suppress(psutil.Error):
            return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
        return False

    def run(self, *words, **keywords):
        """What a command says; asserts that it succeeds."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, **keywords
        )
        assert done.returncode == 0, f"{words[0]}: {done.stderr}"
        return done.stdout

    def job(self, number):
        """What Slurm knows of a job, by its names."""
        said = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.partition("=")[::2] for word in said.split())

    def wait_for(self, number, within_s):
        """The same, once the job is over and its last process is gone."""
        until_s = time.monotonic() + within_s
        while (job := self.job(number))["JobState"] not in OVER or self.run("squeue", "-h"):
            assert time.monotonic() < until_s, f"still {job['JobState']}"
            time.sleep(0.2)
        return job


@contextmanager
def slurm():
    """A running Slurm; skips the test where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, as the path of a socket has to be
    folder.chmod(0o755)
    started = Slurm(folder)
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(folder, ignore_errors=True)
