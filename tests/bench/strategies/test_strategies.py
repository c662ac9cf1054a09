"""Output, LSE and gradients of every strategy match attention in float64."""

import pytest

from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.strategy import Strategy
from tests.support.attention_cases import (
    WORLD_SIZES,
    all_cases,
    cover,
    errors_beyond_limits,
    errors_of,
    waits_of,
)

SETS = {"ours": tuple(STRATEGIES.built_in)} | {name: (name,) for name in STRATEGIES.plugin_names()}
"""One set of ranks tests all built-in strategies; `-k NAME` tests a plug-in and nothing else."""
READS = {"tolist", "aten._local_scalar_dense.default", "aten.lift_fresh.default"}
WAITS = {
    "ring_flash_attn_llama3 on documents": {"tolist"},
    **{f"ringmaster_{kind} on documents": READS for kind in ("ulysses", "ring", "usp")},
}
"""Synchronisations in packages that have document ends on the device; kernels of one document read them."""


def exposes_lse(strategy):
    """Return whether the strategy overrides `log_sum_exp`."""
    return load_strategy_class(strategy).log_sum_exp is not Strategy.log_sum_exp


@pytest.mark.parametrize("choose", [cover, pytest.param(all_cases, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("whose", SETS)
def test_output_lse_and_gradients_match_float64(launcher, tmp_path, whose, world_size, choose):
    errors = errors_of(launcher, tmp_path, choose(SETS[whose], world_size))
    assert not errors_beyond_limits(errors)
    assert all(("lse" in case_errors) == exposes_lse(case[0]) for case, case_errors in errors.items())
    unexpected = {case: waits - WAITS.get(case, set()) for case, waits in waits_of(tmp_path).items()}
    assert not any(unexpected.values()), unexpected
