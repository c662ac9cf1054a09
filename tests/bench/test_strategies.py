"""Every strategy's attention is plain attention: output and gradients against float64."""

import itertools
import json
from dataclasses import replace

import pytest

from bench.legality import refusal
from bench.strategies import STRATEGIES
from tests.attention_cases import check_attention
from tests.cells import make_cell

LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (8, 4), "fewer KV heads than ranks": (4, 2), "MQA": (4, 1)}
SEQ_LEN = 96
BATCH = 2
WORLD_SIZES = (1, 2, 4)


def strategy_layouts():
    return [(name, layout) for name, facts in STRATEGIES.items() for layout in facts.layouts]


def all_cases(world_size):
    """Every legal strategy x layout x dtype x heads x mask on this many ranks."""
    cases = {}
    for (strategy, layout), dtype, heads in itertools.product(strategy_layouts(), LIMITS, HEADS):
        cell = attention_cell(strategy, layout, dtype, heads, world_size)
        if refusal(cell) is None and cell.cluster.world_size == world_size:
            for causal in STRATEGIES[strategy].causal_masks(layout):
                mask = "causal" if causal else "full"
                cases[f"{strategy} {layout} {dtype} {heads} {mask}"] = (cell, causal)
    return cases


def attention_cell(strategy, layout, dtype, heads, world_size):
    cell = make_cell(
        *(f"strategy={strategy}", "engine=ddp", f"batch={BATCH}", f"seq_len={SEQ_LEN}"),
        f"cluster.world_size={world_size}",
    )
    num_heads, num_kv_heads = HEADS[heads]
    model = replace(cell.model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    degree = STRATEGIES[strategy].ulysses_degree(cell.sp_degree, model)
    return replace(cell, layout=layout, dtype=dtype, model=model, ulysses_degree=degree)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_output_and_gradients_match_float64(launcher, tmp_path, world_size):
    cases = all_cases(world_size)
    listed = {name: (cell.to_json(), causal) for name, (cell, causal) in cases.items()}
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    any_cell = next(iter(cases.values()))[0]
    ends = launcher.run(any_cell, tmp_path, entry=check_attention)
    assert all(end.report is not None for end in ends), ends[0].failure or ends[0].log_tail
    errors = json.loads((tmp_path / "errors.json").read_text())
    wrong = {
        name: found for name, found in errors.items() if max(found.values()) > LIMITS[cases[name][0].dtype]
    }
    assert not wrong
    assert len(errors) == len(cases) > 0
