"""A rank's life in a calibration: join, time every case together with the other ranks, report."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.calibrate.attention import around_cases, block_cases
from bench.calibrate.case import Case, timed
from bench.calibrate.engines import engine_cases, plain_cases
from bench.calibrate.exchanges import exchange_cases, hidden_cases
from bench.calibrate.grid import Grid
from bench.calibrate.layer import layer_cases, memory_cases
from bench.config import EngineConfig, RunConfig
from bench.cost.band import Band
from bench.labels import MIB
from bench.node.job import RankJob
from bench.node.worker import join
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog, Stage

ROUNDS = 2
"""Minutes apart: a neighbour on the host once slowed bf16 kernels alone, by two thirds, for so long."""
STAGE = "calibrate"
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER, MOST_MMAP_THRESHOLD_BYTES = 2**31 - 1, 32 * MIB
"""The C library refuses more; see mallopt(3)."""

Key = tuple[str, str, tuple[int, ...]]
"""A case's table, dtype and sizes."""


def calibrate(
    job: RankJob, log: RankLog, grid: Grid, dtypes: Sequence[str], engines: Sequence[str]
) -> dict[str, Any]:
    """A rank's whole life; its report has a row of every case: table, dtype, sizes, seconds."""
    with log.during(STAGE):
        device = join(job)
        _keep_freed_memory()
        start_s = time.monotonic()
        rounds: list[dict[Key, Band]] = []
        for _ in range(ROUNDS):
            rounds.append({})
            for case in _cases(job.cell, grid, dtypes, engines, device):
                rounds[-1][case.table, case.dtype, case.sizes] = timed(case, device)
                log.tell(Stage(STAGE, f"{case.table} {case.dtype}"))
    rows = [[*key, took.low, took.expected, took.high] for key, took in least_disturbed(rounds).items()]
    return {"rows": rows, "took_s": time.monotonic() - start_s}


def least_disturbed(rounds: Sequence[Mapping[Key, Band]]) -> dict[Key, Band]:
    """Of each case the round with the least median."""
    return {key: min((each[key] for each in rounds), key=lambda took: took.expected) for key in rounds[0]}


def _keep_freed_memory() -> None:
    """Let the C library give nothing back to the kernel but blocks beyond 32 MiB.

    Otherwise the first write to a page, which is measured by itself, is a part of some sizes' calls and not
    of others'.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, MOST_MMAP_THRESHOLD_BYTES)
    libc.mallopt(TRIM_THRESHOLD, NEVER)


def _cases(
    cell: RunConfig, grid: Grid, dtypes: Sequence[str], engines: Sequence[str], device: torch.device
) -> Iterator[Case]:
    yield from exchange_cases(grid, device)
    yield from memory_cases(grid, device)
    groups = make_groups(cell)
    for dtype in dtypes:
        yield from layer_cases(grid, dtype, device)
        yield from around_cases(grid, dtype, device)
        if dtype in KERNEL_FACTS[cell.kernel].dtypes[device.type]:
            yield from block_cases(grid, cell.kernel, dtype, device)
            yield from hidden_cases(cell.kernel, dtype, device)
        yield from plain_cases(dtype, device)
        for engine in engines:
            engine_cell = replace(cell, engine=EngineConfig(name=engine), dtype=dtype)
            yield from engine_cases(grid, engine_cell, groups, device)
