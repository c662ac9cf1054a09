"""What the harness itself costs: `python -m bench.overhead`; exits 1 when it misses its own goal.

Fixed cost of a cell: its wall time less its own steps and checks, on 4 CPU ranks, against the same worker
started by torchrun, in turns in one run. Cost of a step: under the harness and under each
instrument against a bare loop, on 2 CPU ranks, in turns in one set of processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.cell.outcome import fixed_cost_s
from bench.cell.planned import PlannedCell
from bench.cell.run import run
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.passes import decoded
from bench.request import values
from bench.request.choices import composed
from bench.request.resolve import resolve
from bench.statistics import Interval, median_interval

RANKS = 4
GOAL_S = 3.0
GOAL_RATIO = 0.25
GOAL_HALF_WIDTH = 0.02
STEP_WORDS = ("seq_len=2k", "cluster=cpu", "cluster.world_size=2", "engine=ddp")
COMPARED = {
    "harness": "a timed step",
    "tap": "with every collective written down",
    "memory": "with every tensor counted",
    "trace": "under the profiler",
}
WORDS = (
    "seq_len=1k",
    "cluster=cpu",
    f"cluster.world_size={RANKS}",
    "measure.steps=1",
    "measure.warmup_steps=0",
    "measure.trace=false",
)


def main() -> None:
    """Print the costs and what is missed of the goals; exit 1 where something is."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="cells of each kind, in turns")
    parser.add_argument("--rounds", type=int, default=150, help="steps of each kind, in turns")
    parser.add_argument("words", nargs="*", help="the cell, e.g. strategy=ulysses engine=fsdp2")
    arguments = parser.parse_args()
    launcher = Launcher()
    try:
        values.whole("--repeats", arguments.repeats)
        values.whole("--rounds", arguments.rounds, least=6)
        cell = resolve(composed(*WORDS, *arguments.words), this_machine())
        step_words = (*arguments.words, *STEP_WORDS, f"measure.steps={arguments.rounds}")
        step_cell = resolve(composed(*step_words), this_machine())
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    missed = [
        *_report_cells(cell, *_in_turns(cell, launcher, arguments.repeats)),
        *_report_steps(step_cell, _step_times_ms(step_cell, launcher)),
    ]
    print("missed: " + "; ".join(missed) if missed else "all goals met")
    sys.exit(ExitCode.FAILED if missed else ExitCode.OK)


def _report_cells(
    cell: RunConfig, cold_s: float, warm_s: Sequence[float], torchrun_s: Sequence[float]
) -> list[str]:
    """Print the fixed costs; what is missed of their goals."""
    ratio = statistics.median(warm_s) / statistics.median(torchrun_s)
    print(f"fixed cost of a cell, {cell.strategy} {cell.engine}, {RANKS} CPU ranks, seconds")
    print(f"  first cell of a sweep (imports included)   {cold_s:.2f}")
    print(f"  every later cell          {_shown(warm_s)}")
    print(f"  the same under torchrun   {_shown(torchrun_s)}")
    print(f"  ratio of medians          {ratio:.2f}")
    return [
        *([f"later cells should stay under {GOAL_S} s"] if statistics.median(warm_s) >= GOAL_S else []),
        *([f"the ratio should stay under {GOAL_RATIO}"] if ratio >= GOAL_RATIO else []),
    ]


def _report_steps(cell: RunConfig, times_ms: Mapping[str, Sequence[float]]) -> list[str]:
    """Print every kind of step against the bare one; what is missed of the goal."""
    bare_ms, missed = times_ms["bare"], []
    print(f"a step, {cell.strategy} ddp, {cell.seq_len} tokens, 2 CPU ranks, against a bare loop's")
    print(f"  bare loop                           {statistics.median(bare_ms):.1f} ms")
    for name, said in COMPARED.items():
        ratios = [mine / bare for mine, bare in zip(times_ms[name], bare_ms, strict=True)]
        interval = median_interval(ratios)
        assert interval is not None
        shown = f"{statistics.median(ratios):.3f} ({interval.low:.3f} to {interval.high:.3f})"
        print(f"  {said:35} {shown}, n={len(ratios)}")
        if name == "harness":
            missed = _missed_step_goal(interval)
    return missed


def _missed_step_goal(interval: Interval) -> list[str]:
    missed = []
    if not interval.low <= 1 <= interval.high:
        missed.append("a timed step should take what a bare one takes")
    if interval.high - interval.low > 2 * GOAL_HALF_WIDTH:
        missed.append(f"the interval should be narrower than +-{GOAL_HALF_WIDTH}; take more --rounds")
    return missed


def _step_times_ms(cell: RunConfig, launcher: Launcher) -> dict[str, list[float]]:
    """Per kind of step and round the slowest rank's time."""
    from bench.overhead.steps import in_turns

    with tempfile.TemporaryDirectory() as folder:
        ends = launcher.run(cell, Path(folder), entry=in_turns)
    reports = [end.report["times_ms"] for end in ends if end.report is not None]
    if len(reports) < len(ends):
        failed = next(end for end in ends if end.report is None)
        sys.exit(f"the steps did not run: {failed.why}")
    return {
        name: [max(ranks) for ranks in zip(*(report[name] for report in reports), strict=True)]
        for name in reports[0]
    }


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
        sys.exit(f"the cell did not run: {record.reason}; try it with run_sweep.py, whose report says more")
    return record.fixed_cost_s


def _under_torchrun(cell: RunConfig, folder: Path) -> float:
    path = folder / "cell.json"
    path.write_text(json.dumps(cell.to_json()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    start = time.monotonic()
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [*command, "-m", "bench.cell.worker", str(path), str(folder)], check=True, capture_output=True
    )
    wall_s = time.monotonic() - start
    reports = [decoded(json.loads(report.read_text())) for report in folder.glob("rank_*.report.json")]
    if len(reports) != RANKS:
        sys.exit(f"only {len(reports)} of {RANKS} ranks reported under torchrun")
    return fixed_cost_s(reports, wall_s)


def _shown(seconds: Sequence[float]) -> str:
    spread = f"from {min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)}"
    return f"{statistics.median(seconds):6.2f}  ({spread})"


if __name__ == "__main__":
    main()
