"""A rank's life in a calibration: join, time every case together with the other ranks, report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.calibrate.attention import around_cases, block_cases
from bench.calibrate.case import Case, Timed, timed
from bench.calibrate.elementwise import elementwise_cases, forward_cases, fresh_cases
from bench.calibrate.engines import Engines, engine_cases, plain_cases
from bench.calibrate.exchanges import exchange_cases, hidden_cases
from bench.calibrate.grid import Grid
from bench.calibrate.heap import keep_freed_memory
from bench.calibrate.products import product_cases
from bench.node.job import RankJob
from bench.node.worker import join
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog, Stage

REQUEST = "request.json"
ROUNDS = 2
"""Minutes apart: a neighbour on the host once slowed bf16 kernels alone, by two thirds, for so long."""
STAGE = "calibrate"
ENGINE_WIDTH = 16
"""Hidden size that decides which of an engine's small tensors it shards."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the ranks are told beside the cell."""

    dtypes: tuple[str, ...]
    kernels: tuple[str, ...]
    engines: tuple[str, ...]
    grid: Grid

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Request:
        fields = json.loads((folder / REQUEST).read_text())
        return msgspec.convert(fields, cls)


def calibrate(job: RankJob, log: RankLog) -> dict[str, Any]:
    """A rank's whole life; its report has a row of every case: table, dtype, sizes, seconds."""
    with log.during(STAGE):
        device, request = join(job), Request.read(job.folder)
        keep_freed_memory()
        start_s = time.monotonic()
        rounds = [_round(job, request, device, log) for _ in range(ROUNDS)]
    rows = [[*key, took.low, took.median, took.high] for key, took in least_disturbed(rounds).items()]
    return {"rows": rows, "took_s": time.monotonic() - start_s}


Key = tuple[str, str, tuple[int, ...]]
"""A case's table, dtype and sizes."""


def least_disturbed(rounds: Sequence[Mapping[Key, Timed]]) -> dict[Key, Timed]:
    """Of each case the round with the least median."""
    return {key: min((each[key] for each in rounds), key=lambda took: took.median) for key in rounds[0]}


def _round(job: RankJob, request: Request, device: torch.device, log: RankLog) -> dict[Key, Timed]:
    """Every case once."""
    times = {}
    for case in _cases(job, request, device):
        times[case.table, case.dtype, case.sizes] = timed(case, device)
        log.tell(Stage(STAGE, f"{case.table} {case.dtype}"))
    return times


def _cases(job: RankJob, request: Request, device: torch.device) -> Iterator[Case]:
    grid = request.grid
    yield from exchange_cases(grid, device)
    yield from fresh_cases(grid, device)
    groups = make_groups(job.cell)
    for dtype in request.dtypes:
        yield from product_cases(grid, dtype, device)
        yield from elementwise_cases(grid, dtype, device)
        yield from forward_cases(grid, dtype, device)
        yield from around_cases(grid, dtype, device)
        for kernel in request.kernels:
            yield from block_cases(grid, kernel, dtype, device)
        yield from hidden_cases(request.kernels[0], dtype, device)
        yield from plain_cases(dtype, device)
        for engine in request.engines:
            model = replace(job.cell.model, hidden_size=ENGINE_WIDTH)
            cell = replace(job.cell, engine=engine, dtype=dtype, model=model)
            yield from engine_cases(grid, Engines(cell, groups, device))
