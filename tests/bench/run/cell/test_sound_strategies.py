"""Every sound strategy passes every gate, in every dtype of every engine, at a short and a long length.

A false alarm costs a user a result, so every limit is above the errors of these cells.
"""

import pytest

from bench.config import DTYPE_BYTES
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import INSTALLED, make_cell, run_cell

LENGTHS = ("512", "4k")
RANKS = {"usp": 4}
"""Ranks of strategies that need more than two to communicate in both of their dimensions."""
MEASURE = (
    "measure.steps=2", "measure.warmup_steps=0", "measure.budget_s=100", "measure.trace=false",
    "measure.repeats=1",
)  # fmt: skip


CASES = [
    (strategy, choice, dtype, length)
    for choice, dtypes in {**{f"engine={name}": facts.dtypes for name, facts in ENGINE_FACTS.items()},
                           "workload=attention": tuple(DTYPE_BYTES)}.items()
    for dtype in dtypes
    for length in LENGTHS
    for strategy in INSTALLED
    if dtype in STRATEGIES[strategy].dtypes
]  # fmt: skip


def cell_of(strategy, choice, dtype, length):
    ranks = f"cluster.world_size={RANKS.get(strategy, 2)}"
    return make_cell(f"strategy={strategy}", choice, f"dtype={dtype}", f"seq_len={length}", ranks, *MEASURE)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_sound_strategy_is_ok(launcher, tmp_path, compared_with_local, case):
    cell = cell_of(*case)
    record = compared_with_local(cell, run_cell(launcher, cell, tmp_path)[0])
    assert (record.status, record.reason) == ("ok", None)
    if cell.workload.trains:
        assert record.losses.compared_steps == len(record.losses.loss)
