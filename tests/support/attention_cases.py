"""Run the parity pass on many cells in one set of ranks, without training."""

import itertools
import json
import sys
from dataclasses import replace
from functools import cache

import torch

from bench.config import Cell
from bench.measure.parity.rank import check_attention, parity_len, random_inputs
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.packing import random_documents
from tests.support.cells import TWO_CORES, make_raw, variants, with_strategy, words_of_choices
from tests.support.cuda.synchronisations import synchronisations

LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "fewer KV heads than ranks": (4, 2), "MQA": (4, 1)}
SEQ_LEN = 96
BATCH = 2
WORLD_SIZES = (1, 2, 4)
MASKED_LAYOUTS = (0, 1, 5)
"""Positions of strategy, layout and mask in a case, which decide the keys that a rank's queries see."""


def all_cases(strategies, world_size):
    """Return all legal combinations of layout, options, dtype, head ratio and mask of strategies.

    A mask is `causal`, `full`, or causal within `documents`.
    """
    cases = {}
    for strategy in strategies:
        facts = STRATEGIES[strategy]
        for (layout, options), dtype, heads in itertools.product(variants(facts, numbers=2), LIMITS, HEADS):
            cell = attention_cell(strategy, layout, options, dtype, heads, world_size)
            if cell.cluster.world_size != world_size:
                continue
            full = replace(cell, workload=replace(cell.workload, mask="full"))
            packed = replace(cell, data=replace(cell.data, packing="documents"))
            by_mask = {"causal": cell, "full": full, "documents": packed}
            if refusal(packed) is not None:
                by_mask["documents"] = replace(packed, batch=1)
            for mask, masked in by_mask.items():
                if refusal(masked) is None:
                    cases[strategy, layout, options, dtype, heads, mask] = masked
    return cases


@cache
def plain_cell(strategy, world_size, *words):
    """Return a cell that all layouts, dtypes and heads of a strategy start from; cached, as it takes long."""
    raw = with_strategy(make_raw("engine=ddp", f"batch={BATCH}", f"seq_len={SEQ_LEN}", *words), strategy)
    return resolve({**raw, "cluster": {**raw["cluster"], "world_size": world_size}}, TWO_CORES)


def attention_cell(strategy, layout, options, dtype, heads, world_size):
    cell = plain_cell(strategy, world_size, *words_of_choices(options))
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    degree = STRATEGIES[strategy].ulysses_degree(cell.sp_degree, model)
    return replace(cell, layout=layout, options=options, dtype=dtype, model=model, ulysses_degree=degree)


def cover(strategies, world_size):
    """Return a part of all cases with every legal pair of choices, and every mask in every layout."""
    cases = all_cases(strategies, world_size)
    return {case: cases[case] for case in pairwise({case: case for case in cases}, whole=MASKED_LAYOUTS)}


def check_cases(job, log):
    """Run in a rank every case of the folder's `cases.json`; write `errors.json` and `limits.json`."""
    from bench.run.node.worker import join

    device = join(job)
    outcomes, waits, checked = [], {}, set()
    for fields, causal in json.loads((job.folder / "cases.json").read_text()):
        cell = Cell.from_flat(fields)
        with log.run_phase(f"{cell.strategy} {cell.layout} {cell.dtype}"):
            forget_kernel_of_ringmaster()
            strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            outcomes.append(check_attention(strategy, device, causal=causal)[0])
            variant = cell.strategy, cell.layout, cell.options, cell.data.packs, causal
            if cell.cluster.world_size == max(WORLD_SIZES) and variant not in checked:
                checked.add(variant)  # heads, dtype and the number of ranks are assumed not to matter
                case = f"{cell.strategy} on documents" if cell.data.packs else cell.strategy
                waits[case] = waits.get(case, []) + waits_in_a_layer(strategy, device, causal)
    (job.folder / f"waits_{job.rank}.json").write_text(json.dumps(waits))
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps([outcome.errors for outcome in outcomes]))
        (job.folder / "limits.json").write_text(json.dumps([outcome.limits for outcome in outcomes]))
    finish_together(device)
    return {}


def forget_kernel_of_ringmaster():
    """Clear ringmaster's caches, which would use the first case's kernel in all cases."""
    loaded = [vars(module) for name, module in sys.modules.items() if name.startswith("ringmaster.")]
    for function in itertools.chain.from_iterable(names.values() for names in loaded):
        getattr(function, "cache_clear", lambda: None)()


def waits_in_a_layer(strategy, device, causal):
    """Return what makes the host wait for the GPU in one more forward and backward of attention."""
    inputs = random_inputs(strategy.cell, parity_len(strategy), device)
    pieces = strategy.slices(inputs[0].shape[2])
    q, k, v, dout = (torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    documents = random_documents(strategy.cell.batch, q.shape[2] * strategy.cell.sp_degree)
    packed = documents if strategy.cell.data.packs else None
    with strategy.use_documents(packed), synchronisations() as found:
        strategy.attention(*leaves, causal=causal).backward(dout)
    return found


def waits_of(folder):
    """Return what made any rank wait in the cases that `errors_of` ran in the folder, by strategy."""
    waits = {}
    for path in sorted(folder.glob("waits_*.json")):
        for case, found in json.loads(path.read_text()).items():
            waits.setdefault(case, set()).update(found)
    return waits


def errors_of(launcher, folder, cases, entry=check_cases):
    """Return for every case the errors of output, gradients and a visible LSE, relative to their maxima."""
    listed = [(cell.flat(), case[-1] != "full") for case, cell in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    ends = launcher.run(next(iter(cases.values())), folder, entry=entry)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    return dict(zip(cases, json.loads((folder / "errors.json").read_text()), strict=True))


def errors_beyond_limits(errors):
    """Return the cases with an error beyond its limit, and their errors."""
    assert all({"out", "dq", "dk", "dv"} <= by_tensor.keys() for by_tensor in errors.values())
    return {
        case: by_tensor for case, by_tensor in errors.items() if max(by_tensor.values()) > LIMITS[case[3]]
    }


def pairwise(cases, whole=()):
    """Return the names of cases in which every pair of values occurs that occurs in any case.

    `cases` maps a name to the case's value on each axis. Of the axes in `whole` not only pairs but all
    combinations occur. The case with most new pairs is taken first; any other order would need twice as many.
    """
    pairs_of = {
        name: {*itertools.combinations(enumerate(values), 2), tuple(values[axis] for axis in whole)}
        for name, values in cases.items()
    }
    missing, cover = set().union(*pairs_of.values()), []
    while missing:
        pairs_of = {name: pairs & missing for name, pairs in pairs_of.items() if pairs & missing}
        most = max(pairs_of, key=lambda name: len(pairs_of[name]))
        missing -= pairs_of[most]
        cover.append(most)
    return cover
