"""The fixed cost of a cell: its wall time less its own steps and checks, against the same under torchrun."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.cell.outcome import fixed_cost_s
from bench.cell.planned import PlannedCell
from bench.cell.run import run
from bench.config import RunConfig
from bench.environment import REPOSITORY
from bench.passes import decoded

RANKS = 4
GOAL_S = 3.0
GOAL_RATIO = 0.25
CELL_WORDS = (
    "seq_len=1k",
    "cluster=cpu",
    f"cluster.world_size={RANKS}",
    "measure.steps=1",
    "measure.warmup_steps=0",
    "measure.trace=false",
)


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Seconds of one cell, in three ways."""

    cold_s: float
    """The first of a sweep, imports included."""
    warm_s: Sequence[float]
    """Every later one."""
    torchrun_s: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.warm_s) / statistics.median(self.torchrun_s)

    def lines(self, cell: RunConfig) -> list[str]:
        return [
            f"fixed cost of a cell, {cell.strategy} {cell.engine.name}, {RANKS} CPU ranks, seconds",
            f"  first cell of a sweep (imports included)   {self.cold_s:.2f}",
            f"  every later cell          {_shown(self.warm_s)}",
            f"  the same under torchrun   {_shown(self.torchrun_s)}",
            f"  ratio of medians          {self.ratio:.2f}",
        ]

    def missed(self) -> list[str]:
        """What is missed of the goals."""
        is_long = statistics.median(self.warm_s) >= GOAL_S
        return [
            *([f"later cells should stay under {GOAL_S} s"] if is_long else []),
            *([f"the ratio of cells should stay under {GOAL_RATIO}"] if self.ratio >= GOAL_RATIO else []),
        ]


def fixed_costs(cell: RunConfig, launcher: Launcher, repeats: int) -> FixedCosts:
    """The first cell's, then those of later cells and of torchrun, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        cold_s = _ours(cell, launcher, Path(folder))
        warm_s, torchrun_s = [], []
        for _ in range(repeats):
            warm_s.append(_ours(cell, launcher, Path(folder)))
            torchrun_s.append(_under_torchrun(cell, Path(folder)))
    return FixedCosts(cold_s, warm_s, torchrun_s)


def _ours(cell: RunConfig, launcher: Launcher, folder: Path) -> float:
    record = run(PlannedCell(cell, repeat=0, order=0), launcher, folder)
    if record.fixed_cost_s is None:
        sys.exit(f"the cell did not run: {record.reason}; try it in a sweep, whose report says more")
    return record.fixed_cost_s


def _under_torchrun(cell: RunConfig, folder: Path) -> float:
    path = folder / "cell.json"
    path.write_text(json.dumps(cell.flat()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    start = time.monotonic()
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [*command, "-m", "bench.node.worker", str(path), str(folder)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    wall_s = time.monotonic() - start
    reports = [decoded(json.loads(report.read_text())) for report in folder.glob("rank_*.report.json")]
    if len(reports) != RANKS:
        sys.exit(f"only {len(reports)} of {RANKS} ranks reported under torchrun")
    return fixed_cost_s(reports, wall_s)


def _shown(seconds: Sequence[float]) -> str:
    spread = f"from {min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)}"
    return f"{statistics.median(seconds):6.2f}  ({spread})"
