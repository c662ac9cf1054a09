"""Run many cells one after another on the same ranks, with no pass but the one that a test needs."""

import json

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.measure.tap import CommunicationTap
from bench.measure.workloads import load_workload_class
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class

CELLS, GRADIENTS = "cells.json", "gradients.npz"


def write_gradients(job, log):
    """Run step 0 of every cell; rank 0 writes its loss, gradient norm and gradients before the update."""
    for name, workload in built_workloads(job, log):
        trainer = workload.trainer
        loss_sum, valid_tokens = trainer.accumulate(0, trainer.cell.padded_len)
        # Copy the gradients before the update, in which clipping scales them in place.
        arrays = {
            parameter: gradient.detach().double().cpu().numpy().copy()
            for parameter, gradient in trainer.engine.full_gradients()
        }
        total = loss_sum.double()
        dist.all_reduce(total)
        arrays["loss"] = float(total / valid_tokens.clamp(min=1))
        arrays |= {"grad_norm": float(trainer.engine.update()), "valid_tokens": int(valid_tokens)}
        if dist.get_rank() == 0:
            (job.folder / name).mkdir(exist_ok=True)
            np.savez(job.folder / name / GRADIENTS, **arrays)
    return {}


def watch_offloading(job, log):
    """Run in a rank a short step of every cell, and another step whose offloaded bytes are reported."""
    results = {}
    for name, workload in built_workloads(job, log):
        workload.short_step()
        offload = workload.activation_offload
        before = offload.packed_bytes if offload else 0
        workload.step(0)
        moved = offload.packed_bytes - before if offload else None
        results[name] = {"activations": moved, "optimizer": workload.trainer.engine.offloaded_bytes()}
    return {"results": results}


def count_products(job, log):
    """Report in a rank the FLOPs of the matrix products outside attention in one step of every cell."""
    results = {}
    for name, workload in built_workloads(job, log):
        with FlopCounterMode(display=False) as counter:
            workload.step(0)
        results[name] = counter.get_flop_counts()["Global"].get(torch.ops.aten.mm, 0)
    return {"results": results}


def look_inside(job, log, before=0):
    """Report in a rank the shapes, bytes and calls inside attention in one step of every cell.

    Run `before` steps first, from which engines learn their order.
    """
    results = {}
    for name, workload in built_workloads(job, log):
        for number in range(before):
            workload.step(number)
        watch = AttentionWatch()
        with workload.rank.strategy.watch_attention(watch), CommunicationTap(watch) as tap:
            workload.step(before)
        results[name] = {
            "shapes": sorted(watch.shapes), "sent_bytes": tap.sent_bytes(), "calls": tap.calls_by_kind(),
        }  # fmt: skip
    return {"results": results}


def built_workloads(job, log):
    """Yield the name and the workload of every cell in the folder's list, built as `run_cell` does."""
    device = join(job)
    for name, fields in json.loads((job.folder / CELLS).read_text()).items():
        cell = Cell.from_flat(fields)
        with log.run_phase(f"{cell.strategy} {cell.layout} {cell.engine.name} {cell.dtype}"):
            strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            with strategy.install() as wiring:
                yield (
                    name,
                    load_workload_class(cell.workload.name)(WorkloadRank(strategy, wiring, device, log.step)),
                )
    finish_together(device)


def run_together(launcher, folder, cells, entry):
    """Run `entry` for cells, which are given by name; return the ends of ranks and the folder, by name.

    Cells share ranks if they have the same cluster and engine, as DeepSpeed changes what it touches. A
    strategy from a package shares ranks with no other strategy, as it may break anything.
    """
    assert [reason for reason in map(refusal, cells.values()) if reason] == []
    sets = {}
    for name, cell in cells.items():
        owner = "ours" if cell.strategy in STRATEGIES.built_in else cell.strategy
        sets.setdefault((owner, cell.engine.name, cell.cluster), []).append(name)
    results = {}
    for number, names in enumerate(sets.values()):
        place = folder / str(number)
        place.mkdir()
        (place / CELLS).write_text(json.dumps({name: cells[name].flat() for name in names}))
        ends = launcher.run(cells[names[0]], place, entry=entry)
        results |= dict.fromkeys(names, (ends, place))
    return results


def gradients_of(launcher, folder, cells):
    """Return the arrays of every cell, or the failures of its ranks if they did not reach it."""
    ran = run_together(launcher, folder, cells, write_gradients)
    return {name: _read(place / name / GRADIENTS) or _failures(ends) for name, (ends, place) in ran.items()}


def results_of_cells(launcher, folder, cells, entry=look_inside):
    """Return the results of `entry` by rank for every cell, or the failures of ranks before it."""
    ran = run_together(launcher, folder, cells, entry)
    return {
        name: [end.report["results"][name] for end in ends]
        if all(end.report for end in ends)
        else _failures(ends)
        for name, (ends, _) in ran.items()
    }


def _failures(ends):
    return str([end.failure or end.log_tail for end in ends])


def _read(path):
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name.removeprefix("module."): arrays[name] for name in arrays}


def selected_params(request, fixture, param):
    """Return the distinct values of `param` in the selected tests of this module that use `fixture`."""
    items = [item for item in request.session.items if item.path == request.path]
    return list(dict.fromkeys(item.callspec.params[param] for item in items if fixture in item.fixturenames))
