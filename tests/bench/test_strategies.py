"""Every strategy's attention is plain attention: output, LSE and gradients against float64."""

import itertools
import json
from dataclasses import replace

import pytest

from bench.attention.strategy import Strategy
from bench.legality import refusal
from bench.strategies import STRATEGIES, runnable
from tests.attention_cases import check_attention
from tests.cells import make_cell, variants
from tests.covers import pairwise

LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "fewer KV heads than ranks": (4, 2), "MQA": (4, 1)}
SEQ_LEN = 96
BATCH = 2
WORLD_SIZES = (1, 2, 4)
SETS = {"ours": tuple(STRATEGIES.ours)} | {name: (name,) for name in STRATEGIES.offered()}
"""One set of ranks tests all of ours; `-k NAME` tests a package's own strategy and nothing else."""
EXPOSE_LSE = {"local", "ring", "ring_flash_attn", "ring_flash_attn_llama3"}


def all_cases(world_size, strategies=tuple(STRATEGIES)):
    """Every legal strategy, layout, option, dtype, head ratio and mask on this many ranks."""
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


def cover(world_size, strategies=tuple(STRATEGIES)):
    return pairwise({case: case for case in all_cases(world_size, strategies)})


def exposes_lse(strategy):
    """Of ours it is known; a package's own strategy says so by its code."""
    if strategy in STRATEGIES.ours:
        return strategy in EXPOSE_LSE
    return runnable(strategy).log_sum_exp is not Strategy.log_sum_exp


@pytest.mark.parametrize("choose", [cover, pytest.param(all_cases, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("whose", SETS)
def test_output_lse_and_gradients_match_float64(launcher, tmp_path, whose, world_size, choose):
    known = all_cases(world_size, SETS[whose])
    cases = {case: known[case] for case in choose(world_size, SETS[whose])}
    listed = [(cell.to_json(), case[-1] == "causal") for case, cell in cases.items()]
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    ends = launcher.run(next(iter(cases.values())), tmp_path, entry=check_attention)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    errors = dict(zip(cases, json.loads((tmp_path / "errors.json").read_text()), strict=True))
    wrong = {case: found for case, found in errors.items() if max(found.values()) > LIMITS[case[3]]}
    assert not wrong
    assert all({"out", "dq", "dk", "dv"} <= found.keys() for found in errors.values())
    assert all(("lse" in found) == exposes_lse(case[0]) for case, found in errors.items())


def test_the_cover_holds_every_strategy_layout_dtype_and_mask():
    for world_size in WORLD_SIZES:
        cases, chosen = all_cases(world_size), cover(world_size)
        assert len(chosen) < len(cases) / 2
        for axis in range(6):
            assert {case[axis] for case in chosen} == {case[axis] for case in cases}
