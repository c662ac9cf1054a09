"""Many cells, one after another on the same ranks: no parity, no timing, only what a test wants of each."""

import json

import numpy as np

from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.measure.gradients import rank as gradients
from bench.measure.tap import CommunicationTap
from bench.measure.workloads import workload_code
from bench.measure.workloads.workload import Rank
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, runnable

CELLS = "cells.json"


def write_gradients(job, log):
    """A rank's whole life: loss, gradient norm and every gradient of each cell, in a folder of its own."""
    for name, workload in built(job, log):
        (job.folder / name).mkdir(exist_ok=True)
        gradients.write_gradients(workload.trainer, job.folder / name)
    return {}


def watch_offloading(job, log):
    """Runs in a rank: each cell takes a short step, then one whose offloaded bytes are reported."""
    seen = {}
    for name, workload in built(job, log):
        workload.short_step()
        offload = workload.activation_offload
        before = offload.packed_bytes if offload else 0
        workload.step(0)
        moved = offload.packed_bytes - before if offload else None
        seen[name] = {"activations": moved, "optimizer": workload.trainer.engine.offloaded_bytes()}
    return {"seen": seen}


def look_inside(job, log, before=0):
    """A rank's whole life: of a step of each cell, what attention was given and collectives carried.

    `before` it come other steps, from which engines learn their order.
    """
    seen = {}
    for name, workload in built(job, log):
        for number in range(before):
            workload.step(number)
        watch = AttentionWatch()
        with workload.rank.strategy.watched(watch), CommunicationTap(watch) as tap:
            workload.step(before)
        seen[name] = {
            "shapes": sorted(watch.shapes), "sent_bytes": tap.sent_bytes(), "calls": tap.calls_by_kind(),
        }  # fmt: skip
    return {"seen": seen}


def built(job, log):
    """The workload of each cell of the folder's list, as `run_cell` builds it, and the cell's name."""
    device = join(job)
    for name, fields in json.loads((job.folder / CELLS).read_text()).items():
        cell = Cell.from_flat(fields)
        with log.during(f"{cell.strategy} {cell.layout} {cell.engine.name} {cell.dtype}"):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            with strategy.install() as wiring:
                yield name, workload_code(cell.workload.name)(Rank(strategy, wiring, device, log.step))
    finish_together(device)


def run_together(launcher, folder, cells, entry):
    """The ends of the ranks of each cell, by its name, and where they ran; `cells` is by name, too.

    Cells that need equal ranks share them; engines do not, as DeepSpeed changes what it touches, and a
    package's own strategy, which may break what it likes, shares them with nobody.
    """
    assert [reason for reason in map(refusal, cells.values()) if reason] == []
    sets = {}
    for name, cell in cells.items():
        whose = "ours" if cell.strategy in STRATEGIES.ours else cell.strategy
        sets.setdefault((whose, cell.engine.name, cell.cluster), []).append(name)
    found = {}
    for number, names in enumerate(sets.values()):
        place = folder / str(number)
        place.mkdir()
        (place / CELLS).write_text(json.dumps({name: cells[name].flat() for name in names}))
        ends = launcher.run(cells[names[0]], place, entry=entry)
        found |= dict.fromkeys(names, (ends, place))
    return found


def gradients_of(launcher, folder, cells):
    """The arrays of each cell; of one that its ranks did not come to, how they ended."""
    ran = run_together(launcher, folder, cells, write_gradients)
    return {
        name: _read(place / name / gradients.FILE_NAME) or _why(ends) for name, (ends, place) in ran.items()
    }


def seen_inside(launcher, folder, cells, entry=look_inside):
    """By rank, what `entry` saw of each cell; of one that its ranks did not come to, how they ended."""
    ran = run_together(launcher, folder, cells, entry)
    return {
        name: [end.report["seen"][name] for end in ends] if all(end.report for end in ends) else _why(ends)
        for name, (ends, _) in ran.items()
    }


def _why(ends):
    return str([end.failure or end.log_tail for end in ends])


def _read(path):
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name.removeprefix("module."): arrays[name] for name in arrays}


def chosen(request, fixture, param):
    """What the chosen tests of this module that need `fixture` are given as `param`, each once."""
    items = [item for item in request.session.items if item.path == request.path]
    return list(dict.fromkeys(item.callspec.params[param] for item in items if fixture in item.fixturenames))
