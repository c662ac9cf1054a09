"""Every strategy's attention is plain attention: output, LSE and gradients against float64."""

import itertools

import pytest

from bench.strategies import STRATEGIES, runnable
from bench.strategies.strategy import Strategy
from tests.attention_cases import (
    MASKED_LAYOUTS,
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


def test_a_strategy_s_code_says_whether_it_exposes_the_lse(monkeypatch):
    """So that one more strategy is in no list here."""
    assert exposes_lse("ring")
    assert not exposes_lse("ulysses")
    monkeypatch.setattr(runnable("ulysses"), "log_sum_exp", runnable("ring").log_sum_exp)
    assert exposes_lse("ulysses")


def test_the_cover_holds_every_two_choices_that_meet_and_every_mask_in_every_layout():
    for world_size in WORLD_SIZES:
        cases, chosen = all_cases(STRATEGIES, world_size), cover(STRATEGIES, world_size)
        assert len(chosen) < len(cases) / 4
        for axes in (*itertools.combinations(range(6), 2), MASKED_LAYOUTS):
            met, found = ({tuple(case[i] for i in axes) for case in each} for each in (cases, chosen))
            assert found == met
