"""Create the launcher of a sweep, for this machine or for nodes on which agents are started."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from bench.common.environment import REPOSITORY, describe_environment, inherited_env
from bench.config import ConfigError
from bench.extras.nodes.link import beats
from bench.extras.nodes.remote import RemoteNode
from bench.plan.plan import Plan
from bench.request import values
from bench.request.choices import Raw
from bench.request.placement import MULTI_NODE_CLUSTERS, SLURM_NODE_NAMES, hosts
from bench.run.cell.launcher import Launcher

LEAVE_S = 8.0
"""Seconds that an agent has to exit once the sweep is over."""
SENT_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
"""Variables that agents get in addition to those that change what a cell does."""
SLURM_GPUS = "SLURM_GPUS_ON_NODE"
"""Variable with the number of GPUs that the job has on this node."""
TASK_VARIABLES = re.compile(r"S(LURM|RUN)_(NTASKS|NPROCS|TASKS|CPUS|GPUS|MEM|DISTRIBUTION|CPU_BIND|GPU_BIND)")
"""Prefixes of variables that describe a batch script's tasks; srun would apply them to an agent."""

Say = Callable[[str], None]


@contextmanager
def launcher_of(plan: Plan, raw: Raw, say: Say) -> Iterator[Launcher]:
    """Yield the launcher of a planned sweep. Agents on other nodes start before it and end with the context.

    Raises:
        ConfigError: An agent cannot be started, or has other software.
    """
    cluster = raw["cluster"]
    measured = any(planned.cell.mode == "measure" for planned in plan.cells)
    if cluster["name"] not in MULTI_NODE_CLUSTERS or not measured:
        yield Launcher()
        return
    count = max(planned.cell.cluster.nodes for planned in plan.cells)
    names = allocated_nodes() if cluster["name"] == "slurm" else hosts(cluster)
    if count > len(names):
        raise ConfigError(f"cluster.nodes={count}: more than there are; write cluster.nodes={len(names)}")
    interface = values.text("cluster.interface", cluster["interface"])
    if count == 1 and interface == "auto":
        interface = "lo"  # no other node connects
    words = [*_agent_words(), plan.lease, str(Path.cwd()), interface]
    env = {name: value for name, value in os.environ.items() if not TASK_VARIABLES.match(name)}
    env["SSH_ASKPASS_REQUIRE"] = "never"  # ssh fails instead of asking in a window
    if gpus := os.environ.get(SLURM_GPUS):
        env["SLURM_GPUS_PER_NODE"] = gpus  # srun would give a job with GPUs per task only those of one task
    nodes: list[RemoteNode] = []
    with ExitStack() as ends:
        ends.callback(_end, nodes)
        for number, name in enumerate(names[:count]):
            peer = names[number - 1].rpartition("@")[2]
            nodes.append(RemoteNode(name, *_command(cluster, name, [*words, peer]), env))
        ends.enter_context(beats([node.link for node in nodes]))
        _wait_until_ready(nodes, say)
        yield Launcher(nodes)


def _end(nodes: Sequence[RemoteNode]) -> None:
    for node in nodes:
        node.leave()
    for node in nodes:
        runs_ranks = node.description is not None and node.lost_reason is None
        node.end(LEAVE_S if runs_ranks else 1.0)


def _command(cluster: Raw, host: str, agent: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that start an agent on a host, and those of the agent itself."""
    template = values.text("cluster.start", cluster["start"])
    try:
        start = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"cluster.start={template}: {error}; quote it as in a shell") from None
    if "{host}" not in template:
        raise ConfigError(
            f"cluster.start={template}: must contain {{host}}; write for example `ssh {{host}}`"
        )
    # ssh joins its words with spaces, and a shell on the other machine splits them again.
    is_ssh = "ssh" in (Path(word).name for word in start)
    return [word.replace("{host}", host) for word in start], [*(map(shlex.quote, agent) if is_ssh else agent)]


def _agent_words() -> list[str]:
    """Return the command of an agent, with the paths and the variables of this process."""
    variables = {name: os.environ[name] for name in SENT_VARIABLES if name in os.environ}
    variables |= inherited_env(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # names GPUs of this machine alone
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    assignments = (f"{name}={value}" for name, value in variables.items())
    # -P ignores the folder it starts in, which may have another `bench/`.
    return ["env", *assignments, sys.executable, "-P", "-m", "bench.extras.nodes"]


def allocated_nodes() -> list[str]:
    """Return the nodes of the Slurm allocation."""
    query = ["scontrol", "show", "hostnames", os.environ[SLURM_NODE_NAMES]]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cluster=slurm: {error}; check the PATH, or use cluster=nodes") from None
    return done.stdout.split()


def _wait_until_ready(nodes: Sequence[RemoteNode], say: Say) -> None:
    """Wait until all agents are ready, and print what they print.

    Raises:
        ConfigError: An agent does not start, or has other software.
    """
    here, said = _software(to_builtins(describe_environment({}))), dict.fromkeys(nodes, "")
    while waiting := [node for node in nodes if node.description is None]:
        wait([node.link.reads for node in waiting], timeout=1.0)
        for node in waiting:
            node.receive()
            if node.lost_reason is not None:
                node.end(LEAVE_S)  # which may still print why
                raise ConfigError(f"node {node.host}: `{node.command}` {node.lost_reason}")
            if (line := node.last_line()) != said[node]:
                said[node], node.link.heard_s = line, time.monotonic()
                say(f"node {node.host}: {line}")
            if node.description is not None:
                _refuse_other_software(node.host, _software(node.description), here)
                say(f"node {node.host} ({node.description['address']}) is ready")


def _refuse_other_software(host: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for name, version in here.items():
        if there.get(name) != version:
            raise ConfigError(
                f"node {host}: {name} is {there.get(name)}, but {version} on this machine; install the same"
                " versions on every node"
            )


def _software(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on every node, by name."""
    return {
        **{name: environment.get(name) for name in ("python", "git_commit", "sources")},
        **environment["packages"],
    }
