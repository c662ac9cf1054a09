"""Loss, gradient norm and every gradient of many cells, by one set of ranks for all that can share one."""

import json

import numpy as np

from bench.cell.worker import join
from bench.config import RunConfig
from bench.passes.gradients.gradients import FILE_NAME
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.strategies import STRATEGIES, runnable
from bench.workloads import WORKLOADS, Rank

CELLS = "cells.json"


def write_gradients(job, log):
    """A rank's whole life: build each cell of the folder's list, and write its gradients where it says."""
    device = join(job)
    for name, fields in json.loads((job.folder / CELLS).read_text()).items():
        cell = RunConfig.from_json(fields)
        with log.during(f"{cell.strategy} {cell.layout} {cell.engine} {cell.dtype}"):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            with strategy.install() as wiring:
                workload = WORKLOADS[cell.workload.name](Rank(strategy, wiring, device, log.step))
                (job.folder / name).mkdir(exist_ok=True)
                workload.write_gradients(job.folder / name)
    finish_together(device)
    return {}


def gradients_of(launcher, folder, cells):
    """The arrays of each cell, by its place in the list; of one that the ranks did not come to, why."""
    assert [reason for reason in map(refusal, cells) if reason] == []
    found = {}
    for number_of_set, numbers in enumerate(_sets(cells)):
        place = folder / str(number_of_set)
        place.mkdir()
        (place / CELLS).write_text(json.dumps({str(number): cells[number].to_json() for number in numbers}))
        ends = launcher.run(cells[numbers[0]], place, entry=write_gradients)
        why = [end.failure or end.log_tail for end in ends]
        found |= {number: _read(place / str(number) / FILE_NAME) or why for number in numbers}
    return [found[number] for number in range(len(cells))]


def _sets(cells):
    sets = {}
    for number, cell in enumerate(cells):
        sets.setdefault((cell.engine, cell.cluster), []).append(number)
    return sets.values()


def _read(path):
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name.removeprefix("module."): arrays[name] for name in arrays}
