"""The parity pass on many cells in one set of ranks, without training any of them."""

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
from bench.strategies import STRATEGIES, runnable
from bench.training.packing import drawn_documents
from tests.support.cells import TWO_CORES, make_raw, variants, with_strategy, words_of_choices
from tests.support.cuda.synchronisations import synchronisations

LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "fewer KV heads than ranks": (4, 2), "MQA": (4, 1)}
SEQ_LEN = 96
BATCH = 2
WORLD_SIZES = (1, 2, 4)
MASKED_LAYOUTS = (0, 1, 5)
"""Strategy, layout and mask, of the axes of a case: which keys a rank's queries see depends on all three."""


def all_cases(strategies, world_size):
    """Every legal layout, option, dtype, head ratio and mask of these strategies on this many ranks.

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
            tried = {"causal": cell, "full": full, "documents": packed}
            if refusal(packed) is not None:
                tried["documents"] = replace(packed, batch=1)
            for mask, each in tried.items():
                if refusal(each) is None:
                    cases[strategy, layout, options, dtype, heads, mask] = each
    return cases


@cache
def plain_cell(strategy, world_size, *words):
    """Resolved once for all its layouts, dtypes and heads, and composed once for all ranks: it takes long."""
    raw = with_strategy(make_raw("engine=ddp", f"batch={BATCH}", f"seq_len={SEQ_LEN}", *words), strategy)
    return resolve({**raw, "cluster": {**raw["cluster"], "world_size": world_size}}, TWO_CORES)


def attention_cell(strategy, layout, options, dtype, heads, world_size):
    cell = plain_cell(strategy, world_size, *words_of_choices(options))
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    degree = STRATEGIES[strategy].ulysses_degree(cell.sp_degree, model)
    return replace(cell, layout=layout, options=options, dtype=dtype, model=model, ulysses_degree=degree)


def cover(strategies, world_size):
    """A part of all cases in which every two choices that can meet do, and every mask in every layout."""
    cases = all_cases(strategies, world_size)
    return {case: cases[case] for case in pairwise({case: case for case in cases}, whole=MASKED_LAYOUTS)}


def check_cases(job, log):
    """A rank's whole life: every case of the folder's `cases.json`, to `errors.json` and `limits.json`."""
    from bench.run.node.worker import join

    device = join(job)
    outcomes, waits, looked_into = [], {}, set()
    for fields, causal in json.loads((job.folder / "cases.json").read_text()):
        cell = Cell.from_flat(fields)
        with log.during(f"{cell.strategy} {cell.layout} {cell.dtype}"):
            forget_kernel_of_ringmaster()
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            outcomes.append(check_attention(strategy, device, causal=causal)[0])
            way = cell.strategy, cell.layout, cell.options, cell.data.packs, causal
            if cell.cluster.world_size == max(WORLD_SIZES) and way not in looked_into:
                looked_into.add(way)  # heads, dtype and fewer ranks are taken to change nothing in it
                case = f"{cell.strategy} on documents" if cell.data.packs else cell.strategy
                waits[case] = waits.get(case, []) + waits_in_a_layer(strategy, device, causal)
    (job.folder / f"waits_{job.rank}.json").write_text(json.dumps(waits))
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps([outcome.errors for outcome in outcomes]))
        (job.folder / "limits.json").write_text(json.dumps([outcome.limits for outcome in outcomes]))
    finish_together(device)
    return {}


def forget_kernel_of_ringmaster():
    """It keeps the first kernel's functions for the life of the process, where these cases have several."""
    loaded = [vars(module) for name, module in sys.modules.items() if name.startswith("ringmaster.")]
    for function in itertools.chain.from_iterable(names.values() for names in loaded):
        getattr(function, "cache_clear", lambda: None)()


def waits_in_a_layer(strategy, device, causal):
    """What makes the host wait in one more call of attention, forward and backward."""
    inputs = random_inputs(strategy.cell, parity_len(strategy), device)
    pieces = strategy.slices(inputs[0].shape[2])
    q, k, v, dout = (torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    documents = drawn_documents(strategy.cell.batch, q.shape[2] * strategy.cell.sp_degree)
    packed = documents if strategy.cell.data.packs else None
    with strategy.packed(packed), synchronisations() as found:
        strategy.attention(*leaves, causal=causal).backward(dout)
    return found


def waits_of(folder):
    """By strategy, on documents or not, what made any rank wait in the cases that `errors_of` ran there."""
    waits = {}
    for path in sorted(folder.glob("waits_*.json")):
        for case, found in json.loads(path.read_text()).items():
            waits.setdefault(case, set()).update(found)
    return waits


def errors_of(launcher, folder, cases, entry=check_cases):
    """Per case the errors of output, LSE where it is exposed, and gradients, relative to their maxima."""
    listed = [(cell.flat(), case[-1] != "full") for case, cell in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    ends = launcher.run(next(iter(cases.values())), folder, entry=entry)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    return dict(zip(cases, json.loads((folder / "errors.json").read_text()), strict=True))


def beyond_their_limits(errors):
    """The cases that are wrong, with what was found."""
    assert all({"out", "dq", "dk", "dv"} <= found.keys() for found in errors.values())
    return {case: found for case, found in errors.items() if max(found.values()) > LIMITS[case[3]]}


def pairwise(cases, whole=()):
    """The names of a cover: every two values that meet in any case, meet in one of these.

    `cases` maps a name to the case's value on each axis; of the axes in `whole` all values that meet do so.
    What brings most together comes first: one case after another would be twice as many.
    """
    left = {
        name: {*itertools.combinations(enumerate(values), 2), tuple(values[axis] for axis in whole)}
        for name, values in cases.items()
    }
    missing, cover = set().union(*left.values()), []
    while missing:
        left = {name: meeting & missing for name, meeting in left.items() if meeting & missing}
        most = max(left, key=lambda name: len(left[name]))
        missing -= left[most]
        cover.append(most)
    return cover
