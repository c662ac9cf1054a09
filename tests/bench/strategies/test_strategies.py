"""Every strategy's attention is plain attention: output, LSE and gradients against float64."""

import pytest

from bench.strategies import STRATEGIES, runnable
from bench.strategies.strategy import Strategy
from tests.support.attention_cases import (
    WORLD_SIZES,
    all_cases,
    beyond_their_limits,
    cover,
    errors_of,
    waits_of,
)

SETS = {"ours": tuple(STRATEGIES.ours)} | {name: (name,) for name in STRATEGIES.plugin_names()}
"""One set of ranks tests all of ours; `-k NAME` tests a package's own strategy and nothing else."""
READS = {"tolist", "aten._local_scalar_dense.default", "aten.lift_fresh.default"}
WAITS = {
    "ring_flash_attn_llama3 on documents": {"tolist"},
    **{f"ringmaster_{each} on documents": READS for each in ("ulysses", "ring", "usp")},
}
"""The package tells kernels on the device where documents end; those that take one at a time read it."""


def exposes_lse(strategy):
    """Its code says so."""
    return runnable(strategy).log_sum_exp is not Strategy.log_sum_exp


@pytest.mark.parametrize("choose", [cover, pytest.param(all_cases, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("whose", SETS)
def test_output_lse_and_gradients_match_float64(launcher, tmp_path, whose, world_size, choose):
    errors = errors_of(launcher, tmp_path, choose(SETS[whose], world_size))
    assert not beyond_their_limits(errors)
    assert all(("lse" in found) == exposes_lse(case[0]) for case, found in errors.items())
    found_in = {case: found - WAITS.get(case, set()) for case, found in waits_of(tmp_path).items()}
    assert not any(found_in.values()), found_in
