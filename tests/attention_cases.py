"""The parity pass on many cells in one set of ranks, without training any of them."""

import itertools
import json
from dataclasses import replace

from bench.config import RunConfig
from bench.passes.parity.attention import check_attention
from bench.ranks.device import finish_together
from bench.ranks.groups import make_groups
from bench.request.legality import refusal
from bench.strategies import STRATEGIES, runnable
from tests.cells import make_cell, variants
from tests.covers import pairwise

LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "fewer KV heads than ranks": (4, 2), "MQA": (4, 1)}
SEQ_LEN = 96
BATCH = 2
WORLD_SIZES = (1, 2, 4)


def all_cases(strategies, world_size):
    """Every legal layout, option, dtype, head ratio and mask of these strategies on this many ranks."""
    cases = {}
    for strategy in strategies:
        facts = STRATEGIES[strategy]
        for (layout, options), dtype, heads in itertools.product(variants(facts), LIMITS, HEADS):
            cell = attention_cell(strategy, layout, options, dtype, heads, world_size)
            if refusal(cell) is None and cell.cluster.world_size == world_size:
                for mask in ("causal", "full"):
                    if (mask == "causal") in facts.causal_masks(layout):
                        cases[strategy, layout, options, dtype, heads, mask] = cell
    return cases


def attention_cell(strategy, layout, options, dtype, heads, world_size):
    cell = make_cell(
        *(f"strategy={strategy}", "engine=ddp", f"batch={BATCH}", f"seq_len={SEQ_LEN}"),
        f"cluster.world_size={world_size}",
    )
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    degree = STRATEGIES[strategy].ulysses_degree(cell.sp_degree, model)
    return replace(cell, layout=layout, options=options, dtype=dtype, model=model, ulysses_degree=degree)


def cover(strategies, world_size):
    """A part of all cases in which every two choices that can meet do."""
    cases = all_cases(strategies, world_size)
    return {case: cases[case] for case in pairwise({case: case for case in cases})}


def by_kernel(cases):
    """The cases in groups of one kernel, each for ranks of its own.

    ring_flash_attn keeps the functions that it found when it was imported, so that in one process all its
    cases would run the kernel of the first.
    """
    groups = {}
    for case, cell in cases.items():
        groups.setdefault(cell.kernel, {})[case] = cell
    return groups


def check_cases(job, log):
    """A rank's whole life: every case of the folder's `cases.json`, to `errors.json` and `limits.json`."""
    from bench.cell.worker import join

    device = join(job)
    outcomes, kernels = [], set()
    for fields, causal in json.loads((job.folder / "cases.json").read_text()):
        cell = RunConfig.from_json(fields)
        kernels.add(cell.kernel)
        assert len(kernels) == 1, "cases of several kernels need ranks of their own: see by_kernel"
        with log.during(f"{cell.strategy} {cell.layout} {cell.dtype}"):
            strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
            outcomes.append(check_attention(strategy, device, causal=causal))
    if job.rank == 0:
        (job.folder / "errors.json").write_text(json.dumps([outcome.errors for outcome in outcomes]))
        (job.folder / "limits.json").write_text(json.dumps([outcome.limits for outcome in outcomes]))
    finish_together(device)
    return {}


def errors_of(launcher, folder, cases, entry=check_cases):
    """Per case the errors of output, LSE where it is exposed, and gradients, relative to their maxima."""
    listed = [(cell.to_json(), case[-1] == "causal") for case, cell in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    ends = launcher.run(next(iter(cases.values())), folder, entry=entry)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    return dict(zip(cases, json.loads((folder / "errors.json").read_text()), strict=True))


def beyond_their_limits(errors):
    """The cases that are wrong, with what was found."""
    assert all({"out", "dq", "dk", "dv"} <= found.keys() for found in errors.values())
    return {case: found for case, found in errors.items() if max(found.values()) > LIMITS[case[3]]}
