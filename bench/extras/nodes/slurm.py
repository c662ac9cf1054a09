"""The agents of a Slurm allocation: one job step a node, as a shared step would outlive a dead agent."""

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
NODE_NAME = "SLURMD_NODENAME"
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
LEAVE_S = 8.0
"""For an agent to leave once the sweep is over."""
END_S = 3.0
"""For srun to end the step of an agent that has not left."""
NOT_FOR_STEPS = re.compile(r"S(LURM|RUN)_(NTASKS|NPROCS|TASKS|CPUS|GPUS|MEM|DISTRIBUTION|CPU_BIND|GPU_BIND)")
"""How the variables begin by which a batch script asks for its own tasks, and srun would for an agent."""
LOG_BYTES = 4000
"""Of what an agent said that are looked at."""
OF_SLURM_ITSELF = ("srun:", "slurmstepd")
"""How the lines begin that an agent did not write."""


def allocated_nodes(variables: Mapping[str, str]) -> list[str]:
    """The names of the allocation's nodes; raises ConfigError outside of one."""
    return _scontrol("show", "hostnames", _node_list(variables)).split()


def own_address(variables: Mapping[str, str]) -> str | None:
    """What Slurm reaches this machine by; None where no job runs on it.

    Raises ConfigError outside of an allocation.
    """
    _node_list(variables)
    node = variables.get(NODE_NAME)
    if not node:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", node))
    return None if found is None else found[1]


def _node_list(variables: Mapping[str, str]) -> str:
    names = variables.get(NODE_LIST)
    if not names:
        raise ConfigError(
            f"cluster=slurm: this is no Slurm allocation, as {NODE_LIST} is not set; start the sweep by"
            " sbatch or salloc, or take cluster=nodes"
        )
    return names


def _scontrol(*words: str) -> str:
    try:
        said = subprocess.run(  # noqa: S603  fixed words, no shell
            ["scontrol", *words],  # noqa: S607  the user's own Slurm
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cluster=slurm: scontrol {' '.join(words)} failed ({error}); check that Slurm's commands are on"
            " the PATH, or take cluster=nodes"
        ) from None
    return said.stdout


@contextmanager
def slurm_agents(
    nodes: Sequence[str], words: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Callable[[], None]]:
    """An agent on each node, in a job step; `words` are its arguments. At the end all have left or are ended.

    What is yielded raises ConfigError for an agent that has ended, when none should.
    """
    steps: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as open_files:
        logs = {node: open_files.enter_context(tempfile.TemporaryFile()) for node in nodes}

        def refuse_ended() -> None:
            for node, step in steps.items():
                if step.poll() is not None:
                    logs[node].seek(0)
                    said = _last(logs[node].read()[-LOG_BYTES:].decode(errors="replace"))
                    raise ConfigError(f"node {node}: its agent ended, exit code {step.returncode}: {said}")

        try:
            for node in nodes:
                steps[node] = subprocess.Popen(  # noqa: S603  fixed words, no shell
                    [*_srun(node, os.environ), *AGENT, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=logs[node],
                    stderr=subprocess.STDOUT,
                    env={**_for_steps(os.environ), **environment},
                    start_new_session=True,  # a terminal's Ctrl-C is the launcher's to answer
                )
            yield refuse_ended
        finally:
            _end(steps.values())


def _end(steps: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait until all have left; what has not by then is ended."""
    _wait(steps, LEAVE_S)
    for signalled in (subprocess.Popen.terminate, subprocess.Popen.kill):
        late = [step for step in steps if step.poll() is None]
        for step in late:
            signalled(step)
        _wait(late, END_S)


def _wait(steps: Iterable[subprocess.Popen[bytes]], within_s: float) -> None:
    """For all of them to end, at most so long."""
    until_s = time.monotonic() + within_s
    for step in steps:
        with suppress(subprocess.TimeoutExpired):
            step.wait(max(0.0, until_s - time.monotonic()))


def _last(said: str) -> str:
    """The last line of an agent, else of Slurm about it."""
    lines = [line for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(OF_SLURM_ITSELF)]
    return (own or lines or ["it said nothing"])[-1]


def _for_steps(variables: Mapping[str, str]) -> dict[str, str]:
    """These without what concerns the tasks of a batch script; modules are found wherever a step starts."""
    kept = {name: value for name, value in variables.items() if not NOT_FOR_STEPS.match(name)}
    path = [str(REPOSITORY), *filter(None, [variables.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


def _srun(node: str, variables: Mapping[str, str]) -> list[str]:
    """A step of its own with all that the job has of the node; ranks are bound by nobody but the agent.

    GPUs are asked for by number, as a step of a job that counts them by task would get those of one task.
    """
    gpus = variables.get(GPUS_ON_NODE)
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill", "--overlap", "--whole",
        "--mpi=none", "--cpu-bind=none", "--export=ALL", *([f"--gpus-per-node={gpus}"] if gpus else []),
    ]  # fmt: skip


AGENT = (sys.executable, "-P", "-m", "bench.extras.nodes")
"""Found by PYTHONPATH: the folder it starts in may have a `bench/` of its own."""
