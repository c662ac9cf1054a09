"""Run the agents of a Slurm allocation, with one job step per node.

A step that all agents share would go on after one of them has ended.
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
NOT_FOR_STEPS = re.compile(r"S(LURM|RUN)_(NTASKS|NPROCS|TASKS|CPUS|GPUS|MEM|DISTRIBUTION|CPU_BIND|GPU_BIND)")
"""Prefixes of variables that describe the tasks of a batch script, and that srun would apply to an agent."""
LOG_BYTES = 4000
"""Bytes of the end of an agent's output in which its last line is looked up."""
SLURM_PREFIXES = ("srun:", "slurmstepd")
"""Prefixes of lines that Slurm wrote and not the agent."""


def allocated_nodes(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the allocation's nodes; raise ConfigError outside of an allocation."""
    return _scontrol("show", "hostnames", _node_list(variables)).split()


def own_address(variables: Mapping[str, str]) -> str | None:
    """Return the address by which Slurm reaches this machine, or None if it is no node of the allocation.

    Raises:
        ConfigError: The process runs outside of an allocation.
    """
    _node_list(variables)
    node = variables.get(NODE_NAME)
    if not node:
        return None
    match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", node))
    return None if match is None else match[1]


def _node_list(variables: Mapping[str, str]) -> str:
    names = variables.get(NODE_LIST)
    if not names:
        raise ConfigError(
            f"cluster=slurm: this is no Slurm allocation, as {NODE_LIST} is not set; start the sweep by"
            " sbatch or salloc, or use cluster=nodes"
        )
    return names


def _scontrol(*words: str) -> str:
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

    Args:
        nodes: Names of the nodes.
        words: Command-line arguments of the agents.
        environment: Environment variables of the agents.

    Yields:
        A function that raises ConfigError if an agent has ended.
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
    """Return the last line that an agent wrote, or else that Slurm wrote."""
    lines = [line for line in output.splitlines() if line.strip()]
    of_agent = [line for line in lines if not line.startswith(SLURM_PREFIXES)]
    return (of_agent or lines or ["it wrote nothing"])[-1]


def _step_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a batch script's tasks, with a path to this package's modules."""
    others = {name: value for name, value in variables.items() if not NOT_FOR_STEPS.match(name)}
    path = [str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH")])]
    return others | {"PYTHONPATH": os.pathsep.join(path)}


def _srun(node: str, variables: Mapping[str, str]) -> list[str]:
    """Return the srun command of a step with all resources of the job on a node, without binding to cores.

    GPUs are requested by number, as in a job that counts GPUs by task the step would get those of one task.
    """
    gpus = variables.get(GPUS_ON_NODE)
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill", "--overlap", "--whole",
        "--mpi=none", "--cpu-bind=none", "--export=ALL", *([f"--gpus-per-node={gpus}"] if gpus else []),
    ]  # fmt: skip


AGENT = (sys.executable, "-P", "-m", "bench.extras.nodes")
"""Command of an agent. `-P` ignores the folder it starts in, which may have another `bench/`."""
