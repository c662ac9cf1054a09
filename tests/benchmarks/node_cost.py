"""Fixed cost of a cell on two nodes over that of the same cell on one, on this machine.

    python -m tests.benchmarks.node_cost [CELLS]

The nodes are two network namespaces with an sshd each, or those of the Slurm allocation it runs in. Cells on
one and on two nodes are interleaved. Prints both medians, and the median of the paired ratios with its 95 %
interval. Exits 1 if that median is above GOAL. Run nothing else at the same time.
"""

import os
import shlex
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common.statistics import median_interval
from bench.extras.nodes.machines import SLURM_NODES, launcher_of
from bench.plan.plan import plan
from bench.run.cell.launcher import Launcher
from tests.support.cells import TWO_CORES, make_raw, run_cell, tiny_cell
from tests.support.namespaces import ssh_cluster

GOAL = 1.1
CELL = ("strategy=ulysses", "seq_len=1k", "cluster.world_size=4", "engine=ddp")


def main() -> None:
    count = int(sys.argv[1]) if sys.argv[1:] else 20
    costs_s: dict[str, list[float]] = {"one node": [], "two nodes": []}
    name = "slurm" if os.environ.get(SLURM_NODES) else "nodes"
    cells = {
        "one node": tiny_cell(*CELL),
        "two nodes": tiny_cell(*CELL, f"cluster={name}", "cluster.nodes=2"),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        raw = make_raw(f"cluster={name}", "cluster.nodes=2", "cluster.world_size=4", "lease=none")
        placed = {**raw["cluster"], "interface": "lo"}
        if name == "nodes":
            started = stack.enter_context(ssh_cluster(folder))
            ssh = started.nodes.on(0, "ssh", "-F", started.ssh_config, "{host}")
            placed |= {"hosts": started.nodes.names, "start": shlex.join(ssh), "interface": "auto"}
        raw = {**raw, "cluster": placed, "sweep_dir": str(folder / "sweep")}
        two = stack.enter_context(launcher_of(plan([raw], TWO_CORES, single=True), raw, print))
        launchers = {"one node": Launcher(), "two nodes": two}
        for turn in range(count + 1):
            for where in [*launchers] if turn % 2 else reversed(launchers):
                record, _ = run_cell(launchers[where], cells[where], folder / where.replace(" ", "_"))
                assert record.status == "ok", record.reason
                if turn:  # the first cells import what is not imported yet
                    costs_s[where].append(record.fixed_cost_s)
    for where, samples_s in costs_s.items():
        print(f"{where}: {statistics.median(samples_s):.3f} s ({min(samples_s):.3f} to {max(samples_s):.3f})")
    ratios = [two / one for one, two in zip(*costs_s.values(), strict=True)]
    print(f"two nodes over one: {statistics.median(ratios):.3f} of {count} pairs, {median_interval(ratios)}")
    sys.exit(statistics.median(ratios) > GOAL)


if __name__ == "__main__":
    main()
