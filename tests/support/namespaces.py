"""Simulate nodes on one machine by network namespaces on a bridge, each with a host name and a hosts file.

Nodes share cores, files and clock. Addresses are of the benchmarking range (RFC 2544) and exist only inside.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bench.common.environment import REPOSITORY
from tests.support.records import read_lines

TOOLS = ("ip", "nsenter", "unshare", "/usr/sbin/sshd", "ssh-keygen")
SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
"""
SSH = """
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
LogLevel ERROR
"""
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def missing_requirement():
    """Return why no namespaces can be made here, or None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "network namespaces need root and are not allowed here"


class Namespaces:
    """Nodes `host0`, `host1`, ... that are joined by a bridge in another namespace."""

    def __init__(self, count, folder):
        self._id = f"u{os.getpid() % 100000}"
        self._hosts = Path(folder) / "hosts"
        self._bridge = f"{self._id}sw"
        self.names = [f"host{number}" for number in range(count)]
        self.addresses = [f"198.18.0.{number + 1}" for number in range(count)]
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def up(self):
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "name", "sw0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "sw0", "up")
        for number, address in enumerate(self.addresses):
            name, port = self._space(number), f"p{number}"
            _ip("netns", "add", name)
            link = ["link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", name]
            _ip("-n", self._bridge, *link)
            _ip("-n", self._bridge, "link", "set", port, "master", "sw0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def down(self):
        """End what still runs on the nodes, such as ssh sessions over a cut link, and remove them."""
        for name in [*map(self._space, range(len(self.names))), self._bridge]:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in pids.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, number, *words):
        """Return the command that runs these words on a node."""
        enter = ["nsenter", f"--net=/run/netns/{self._space(number)}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", ENTER, "sh", self.names[number], str(self._hosts), *map(str, words)]

    def set_link(self, number, state):
        """Disconnect a node from the bridge (`down`) or connect it (`up`)."""
        _ip("-n", self._bridge, "link", "set", f"p{number}", state)

    def _space(self, number):
        return f"{self._id}n{number}"


@contextmanager
def namespaces(count, folder):
    """Yield `count` nodes; skip the test if namespaces cannot be made."""
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    nodes = Namespaces(count, folder)
    try:
        nodes.up()
        yield nodes
    finally:
        nodes.down()


class Cluster:
    """Cluster with an ssh server on each node, whose sweeps start on the first node."""

    def __init__(self, nodes, folder):
        self.nodes = nodes
        self.ssh_config = folder / "ssh_config"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        self.ssh_config.write_text(SSH.format(folder=folder))
        (folder / "sshd_config").write_text(SSHD.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        self.servers = [
            subprocess.Popen(self.nodes.on(number, "/usr/sbin/sshd", "-D", "-f", folder / "sshd_config"))
            for number in range(len(nodes.names))
        ]
        for name in nodes.names:
            answers = f"until ssh -F {self.ssh_config} {name} true; do sleep 0.1; done"
            subprocess.run(nodes.on(0, "sh", "-c", answers), check=True, capture_output=True, timeout=30)

    @contextmanager
    def sweep(self, folder, *words):
        """Yield the process of a running sweep over all nodes, and kill it at the end."""
        placement = (
            "cluster=nodes",
            f"cluster.hosts={','.join(self.nodes.names)}",
            f"cluster.start=ssh -F {self.ssh_config} {{host}}",
            f"sweep_dir={folder}",
            "lease=none",
        )
        launcher = subprocess.Popen(
            self.nodes.on(0, sys.executable, "run_sweep.py", "-m", *placement, *words),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield launcher
        finally:
            launcher.kill()
            launcher.communicate()

    def records(self, folder, *words):
        """Run a whole sweep over the nodes and return its records."""
        with self.sweep(folder, *words) as launcher:
            output, _ = launcher.communicate(timeout=900)
            assert launcher.returncode == 0, output
        return read_lines(Path(folder) / "records.jsonl")


@contextmanager
def ssh_cluster(folder):
    """Yield a cluster of two nodes; skip the test if none can be made."""
    with namespaces(2, folder) as nodes:
        cluster = Cluster(nodes, folder)
        try:
            yield cluster
        finally:
            for server in cluster.servers:
                server.kill()


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
