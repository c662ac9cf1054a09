"""Ours against the packages: `python -m bench.compare_implementations`; exits 1 where ours is slower.

One attention call, forward and backward, with the same inputs, kernel, layout and ranks, the two in turns in
one set of processes. A call takes as long as its slowest rank; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cell.launcher import Launcher
from bench.command import tool_words
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.labels import length_label
from bench.node.lease import add_lease_option, lease_of
from bench.request import values
from bench.request.choices import composed
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.statistics import median_interval
from bench.strategies import STRATEGIES, runnable

if TYPE_CHECKING:
    from bench.node.job import RankJob
    from bench.ranks.log import RankLog
    from bench.strategies.strategy import Strategy

PAIRS = (
    ("ulysses", ("strategy=deepspeed_ulysses",)),
    ("ring", ("strategy=ring_flash_attn",)),
    ("ring", ("strategy=torch_cp", "strategy.rotation=alltoall")),
)
"""Ours, and the words for the package that does the same."""
WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Milliseconds of this rank's calls, in turns."""

    ours_ms: list[float]
    package_ms: list[float]


def main() -> None:
    """Print package / ours for every pair, length and degree; exit 1 where an interval lies below 1."""
    parser = argparse.ArgumentParser(prog=tool_words("bench.compare_implementations"), description=__doc__)
    parser.add_argument("--lengths", default="1k,4k,16k")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--repeats", type=int, default=20)
    add_lease_option(parser)
    parser.add_argument("words", nargs="*", help="the cell, e.g. model.num_heads=8 model=qwen3_nano")
    arguments = parser.parse_args()
    axes = product(arguments.ranks.split(","), arguments.lengths.split(","), PAIRS)
    try:
        pairs = [_cells(ours, theirs, length, ranks, arguments) for ranks, length, (ours, theirs) in axes]
        with lease_of(arguments, [cell for cell, _ in pairs]):
            slower = _compare(pairs, arguments.repeats)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    sys.exit(ExitCode.FAILED if slower else ExitCode.OK)


def _compare(pairs: Sequence[tuple[RunConfig, RunConfig]], repeats: int) -> int:
    """Print a line a pair of cells; how many of ours are slower."""
    launcher, slower = Launcher(), 0
    print("package time / our time, median and 95 % interval of paired ratios; above 1 ours is faster")
    for cell, package in pairs:
        ratios, ours_ms = _ratios(launcher, cell, package, repeats)
        line, is_slower = _line(ratios, ours_ms)
        slower += is_slower
        where = f"{cell.cluster.world_size} ranks {length_label(cell.seq_len):>4}"
        print(f"{where} {package.strategy:17} / {cell.strategy:7} {line}", flush=True)
    return slower


def in_turns(job: RankJob, log: RankLog) -> dict[str, Any]:
    """A rank's whole life: the cell and the folder's `package`, call by call in alternating order."""
    from bench.node.worker import join
    from bench.passes.parity.attention import random_inputs
    from bench.ranks.groups import make_groups

    with log.during("compare"):
        device = join(job)
        request = json.loads((job.folder / "request.json").read_text())
        groups, package = make_groups(job.cell), RunConfig.from_json(request["package"])
        both = [
            runnable(cell.strategy)(cell, groups, STRATEGIES[cell.strategy]) for cell in (job.cell, package)
        ]
        inputs = random_inputs(job.cell, job.cell.seq_len, device)
        calls = WARM_UP_CALLS + request["repeats"]
        times_ms: list[list[float]] = [[], []]
        for call in range(calls):
            for which in (0, 1) if call % 2 else (1, 0):
                times_ms[which].append(_call_ms(both[which], inputs))
    return asdict(Comparison(*(times[WARM_UP_CALLS:] for times in times_ms)))


def _call_ms(strategy: Strategy, inputs: Sequence[Any]) -> float:
    """Forward and backward of this rank's shard, from a barrier to the end of the device's work."""
    import torch
    import torch.distributed as dist

    from bench.passes.timing.clock import synchronise

    pieces = strategy.slices(inputs[0].shape[2])
    q, k, v, dout = (torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dist.barrier()
    start = time.perf_counter()
    strategy.attention(*leaves).backward(dout)
    synchronise(q.device)
    return (time.perf_counter() - start) * 1e3


def _cells(
    ours: str, theirs: Sequence[str], length: str, ranks: str, arguments: argparse.Namespace
) -> tuple[RunConfig, RunConfig]:
    words = [f"seq_len={length}", f"cluster.world_size={ranks}", "workload=attention", *arguments.words]
    cells = [resolve(composed(*who, *words), this_machine()) for who in ([f"strategy={ours}"], theirs)]
    for cell in cells:
        reason = refusal(cell)
        if reason is not None:
            raise ConfigError(reason)
    values.whole("--repeats", arguments.repeats, least=6)
    return cells[0], cells[1]


def _ratios(
    launcher: Launcher, cell: RunConfig, package: RunConfig, repeats: int
) -> tuple[list[float], float]:
    """Paired ratios of the slowest ranks, and our median time in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"package": package.to_json(), "repeats": repeats}
        (Path(folder) / "request.json").write_text(json.dumps(request))
        ends = launcher.run(cell, Path(folder), entry=in_turns)
    reports = [end.report for end in ends if end.report is not None]
    if len(reports) < len(ends):
        failed = next(end for end in ends if end.report is None)
        sys.exit(f"{cell.strategy} against {package.strategy} failed: {failed.why}")
    ours, theirs = (
        [max(call) for call in zip(*(report[side] for report in reports), strict=True)]
        for side in ("ours_ms", "package_ms")
    )
    return [b / a for a, b in zip(ours, theirs, strict=True)], statistics.median(ours)


def _line(ratios: list[float], ours_ms: float) -> tuple[str, bool]:
    interval = median_interval(ratios)
    assert interval is not None
    verdict = "ours is faster" if interval.low > 1 else "no clear difference"
    if interval.high < 1:
        verdict = f"ours is slower by {1 / statistics.median(ratios) - 1:.1%}"
    shown = f"{statistics.median(ratios):5.2f} ({interval.low:.2f} to {interval.high:.2f})"
    return f"{shown}, ours {ours_ms:.1f} ms, n={len(ratios)}: {verdict}", interval.high < 1


if __name__ == "__main__":
    main()
