"""Agent of a node, which a sweep starts by ssh, srun or another command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Move standard input and output away, so that no import can print into the link, and run the agent."""
    reads, writes = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    from bench.config import ConfigError
    from bench.extras.nodes.agent import run_agent

    try:
        run_agent(reads, writes, *sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
