"""What the harness itself costs: `python -m bench.overhead`; exits 1 when it misses its own goal.

Fixed cost of a cell: its wall time less its steps and its traced pass, on 4 CPU ranks, against the same
worker started afresh by torchrun, in turns in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.cell import PlannedCell, fixed_cost_s, run
from bench.conf_files import composed
from bench.config import RunConfig
from bench.environment import this_machine
from bench.launcher import Launcher
from bench.resolve import resolve

RANKS = 4
GOAL_S = 3.0
GOAL_RATIO = 0.25
WORDS = (
    "seq_len=1k",
    "cluster=cpu",
    f"cluster.world_size={RANKS}",
    "measure.steps=1",
    "measure.warmup_steps=0",
    "measure.trace=false",
)


def main() -> None:
    """Print both fixed costs and their ratio; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turns")
    parser.add_argument("words", nargs="*", help="the cell, e.g. strategy=ulysses engine=fsdp2")
    arguments = parser.parse_args()
    cell = resolve(composed(*WORDS, *arguments.words), this_machine())
    launcher = Launcher()
    cold_s, warm_s, torchrun_s = _in_turns(cell, launcher, arguments.repeats)
    ratio = statistics.median(warm_s) / statistics.median(torchrun_s)
    print(f"fixed cost of a cell, {cell.strategy} {cell.engine}, {RANKS} CPU ranks, seconds")
    print(f"  first cell of a sweep (imports included)   {cold_s:.2f}")
    print(f"  every later cell          {_shown(warm_s)}")
    print(f"  the same under torchrun   {_shown(torchrun_s)}")
    print(f"  ratio of medians          {ratio:.2f}")
    missed = [
        *([f"later cells should stay under {GOAL_S} s"] if statistics.median(warm_s) >= GOAL_S else []),
        *([f"the ratio should stay under {GOAL_RATIO}"] if ratio >= GOAL_RATIO else []),
    ]
    print("missed: " + "; ".join(missed) if missed else f"goals met: under {GOAL_S} s and {GOAL_RATIO}")
    sys.exit(bool(missed))


def _in_turns(cell: RunConfig, launcher: Launcher, repeats: int) -> tuple[float, list[float], list[float]]:
    """The first cell's fixed cost, then those of later cells and of torchrun, turn about."""
    with tempfile.TemporaryDirectory() as folder:
        cold_s = _ours(cell, launcher, Path(folder))
        warm_s, torchrun_s = [], []
        for _ in range(repeats):
            warm_s.append(_ours(cell, launcher, Path(folder)))
            torchrun_s.append(_under_torchrun(cell, Path(folder)))
    return cold_s, warm_s, torchrun_s


def _ours(cell: RunConfig, launcher: Launcher, folder: Path) -> float:
    record = run(PlannedCell(cell, repeat=0, order=0), launcher, folder)
    if record.fixed_cost_s is None:
        sys.exit(f"the cell did not run: {record.reason}")
    return record.fixed_cost_s


def _under_torchrun(cell: RunConfig, folder: Path) -> float:
    path = folder / "cell.json"
    path.write_text(json.dumps(cell.to_json()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    start = time.monotonic()
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [*command, "-m", "bench.worker", str(path), str(folder)], check=True, capture_output=True
    )
    wall_s = time.monotonic() - start
    reports = [json.loads(report.read_text()) for report in folder.glob("rank_*.report.json")]
    if len(reports) != RANKS:
        sys.exit(f"only {len(reports)} of {RANKS} ranks reported under torchrun")
    return fixed_cost_s(reports, wall_s)


def _shown(seconds: list[float]) -> str:
    spread = f"from {min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)}"
    return f"{statistics.median(seconds):6.2f}  ({spread})"


if __name__ == "__main__":
    main()
