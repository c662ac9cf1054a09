"""The agents of a Slurm allocation: one job step a node, as a shared step would outlive a dead agent."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from bench.config import ConfigError

NODE_LIST = "SLURM_JOB_NODELIST"
NODE_ID = "SLURM_NODEID"
LEAVE_S = 8.0
"""For an agent to leave once the sweep is over."""


def allocated_nodes(variables: Mapping[str, str]) -> list[str]:
    """The names of the allocation's nodes; raises ConfigError outside of one."""
    names = variables.get(NODE_LIST)
    if not names:
        raise ConfigError(
            "cluster=slurm: this is no Slurm allocation, as SLURM_JOB_NODELIST is not set; start the sweep"
            " by salloc or sbatch, or take cluster=nodes"
        )
    try:
        said = subprocess.run(  # noqa: S603  fixed words, no shell
            ["scontrol", "show", "hostnames", names],  # noqa: S607  the user's own Slurm
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"cluster=slurm: scontrol show hostnames {names} failed ({error}); check that Slurm's commands"
            " are on the PATH, or take cluster=nodes"
        ) from None
    return said.stdout.split()


class SlurmAgents:
    """The job steps in which agents run."""

    def __init__(self, nodes: Sequence[str], words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one on each node; `words` are an agent's command."""
        self._logs: dict[str, IO[bytes]] = {}
        self._steps: dict[str, subprocess.Popen[bytes]] = {}
        for node in nodes:
            self._logs[node] = tempfile.TemporaryFile()  # noqa: SIM115  closed with its step
            self._steps[node] = subprocess.Popen(  # noqa: S603  fixed words, no shell
                [*_srun(node), *words],
                stdin=subprocess.DEVNULL,
                stdout=self._logs[node],
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's to answer
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node, step in self._steps.items():
            try:
                step.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
            self._logs[node].close()

    def refuse_ended(self) -> None:
        """Raises ConfigError for an agent that has ended; only while all are to come or to stay."""
        for node, step in self._steps.items():
            if step.poll() is not None:
                self._logs[node].seek(0)
                said = self._logs[node].read()[-1000:].decode(errors="replace").strip()
                raise ConfigError(
                    f"node {node}: its agent ended with exit code {step.returncode}:"
                    f" {said.splitlines()[-1] if said else 'it said nothing'}"
                )


def _srun(node: str) -> list[str]:
    """A step of its own, which takes all that the job has of the node and leaves others their share."""
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--no-kill", "--overlap", "--whole",
        "--export=ALL",
    ]  # fmt: skip
