"""Run the agents of a Slurm allocation, with one job step per node.

One step for all agents would continue after an agent has ended, and hide its end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from bench.common.environment import REPOSITORY
from bench.config import ConfigError

NODE_LIST = "SLURM_JOB_NODELIST"
"""Variable with the nodes of the allocation."""
NODE_NAME = "SLURMD_NODENAME"
"""Variable with the name of this node."""
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
"""Variable with the number of GPUs that the job has on this node."""
LEAVE_S = 8.0
"""Seconds that agents have to exit once the sweep is over."""
END_S = 3.0
"""Seconds that srun has to end the step of an agent that has not exited."""
TASK_VARIABLES = re.compile(r"S(LURM|RUN)_(NTASKS|NPROCS|TASKS|CPUS|GPUS|MEM|DISTRIBUTION|CPU_BIND|GPU_BIND)")
"""Prefixes of variables that describe a batch script's tasks; srun would apply them to an agent."""
LOG_BYTES = 4000
"""Bytes at the end of an agent's output from which its last line is taken."""
SLURM_PREFIXES = ("srun:", "slurmstepd")
"""Prefixes of lines that Slurm wrote and not the agent."""


def allocated_nodes(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the allocation's nodes; raise ConfigError outside of an allocation."""
    return _scontrol("show", "hostnames", _require_node_list(variables)).split()


def own_address(variables: Mapping[str, str]) -> str | None:
    """Return the address at which Slurm reaches this machine, or None if it is no node of the allocation.

    Raises:
        ConfigError: The process runs outside of an allocation.
    """
    _require_node_list(variables)
    node = variables.get(NODE_NAME)
    if not node:
        return None
    match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", node))
    return None if match is None else match[1]


def _require_node_list(variables: Mapping[str, str]) -> str:
    """Return the allocation's nodes as text such as `node[1-4]`; raise ConfigError outside of one."""
    names = variables.get(NODE_LIST)
    if not names:
        raise ConfigError(
            f"cluster=slurm: this is no Slurm allocation, as {NODE_LIST} is not set; start the sweep by"
            " sbatch or salloc, or use cluster=nodes"
        )
    return names


def _scontrol(*words: str) -> str:
    """Return the output of a scontrol command; raise ConfigError if it fails."""
    try:
        done = subprocess.run(  # noqa: S603  fixed words, no shell
            ["scontrol", *words],  # noqa: S607  the user's own Slurm
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cluster=slurm: scontrol {' '.join(words)} failed ({error}); check that Slurm's commands are on"
            " the PATH, or use cluster=nodes"
        ) from None
    return done.stdout


@contextmanager
def slurm_agents(
    nodes: Sequence[str], words: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Callable[[], None]]:
    """Run an agent on each node, in a job step. When the context closes, the agents exit or are ended.

    `words` are the command-line arguments of the agents. The context yields a function that raises
    ConfigError if an agent has ended.
    """
    steps: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as open_files:
        logs = {node: open_files.enter_context(tempfile.TemporaryFile()) for node in nodes}

        def refuse_ended() -> None:
            for node, step in steps.items():
                if step.poll() is not None:
                    logs[node].seek(0)
                    output = logs[node].read()[-LOG_BYTES:].decode(errors="replace")
                    raise ConfigError(
                        f"node {node}: its agent ended with exit code {step.returncode}: {_last_line(output)}"
                    )

        try:
            for node in nodes:
                steps[node] = subprocess.Popen(  # noqa: S603  fixed words, no shell
                    [*_srun(node, os.environ), *AGENT, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=logs[node],
                    stderr=subprocess.STDOUT,
                    env={**_step_environment(os.environ), **environment},
                    start_new_session=True,  # the launcher handles a terminal's Ctrl-C
                )
            yield refuse_ended
        finally:
            _end_steps(steps.values())


def _end_steps(steps: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait until the agents have exited, and end those that have not."""
    _wait(steps, LEAVE_S)
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        late = [step for step in steps if step.poll() is None]
        for step in late:
            end(step)
        _wait(late, END_S)


def _wait(steps: Iterable[subprocess.Popen[bytes]], within_s: float) -> None:
    """Wait for the steps to end, at most `within_s` seconds."""
    until_s = time.monotonic() + within_s
    for step in steps:
        with suppress(subprocess.TimeoutExpired):
            step.wait(max(0.0, until_s - time.monotonic()))


def _last_line(output: str) -> str:
    """Return the last line of the agent itself; if it wrote none, the last line of Slurm."""
    lines = [line for line in output.splitlines() if line.strip()]
    of_agent = [line for line in lines if not line.startswith(SLURM_PREFIXES)]
    return (of_agent or lines or ["it wrote nothing"])[-1]


def _step_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without TASK_VARIABLES, and with this package's folder in PYTHONPATH."""
    others = {name: value for name, value in variables.items() if not TASK_VARIABLES.match(name)}
    path = [str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH")])]
    return others | {"PYTHONPATH": os.pathsep.join(path)}


def _srun(node: str, variables: Mapping[str, str]) -> list[str]:
    """Return the srun command of a step with all resources of the job on a node, without binding to cores.

    The command requests the number of GPUs. Otherwise, in a job with GPUs per task, the step would get only
    the GPUs of one task.
    """
    gpus = variables.get(GPUS_ON_NODE)
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill", "--overlap", "--whole",
        "--mpi=none", "--cpu-bind=none", "--export=ALL", *([f"--gpus-per-node={gpus}"] if gpus else []),
    ]  # fmt: skip


AGENT = (sys.executable, "-P", "-m", "bench.extras.nodes")
"""Command of an agent. `-P` ignores the folder it starts in, which may have another `bench/`."""
