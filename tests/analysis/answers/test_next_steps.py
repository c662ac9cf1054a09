"""Advice for every status, without what a cell has already done."""

import pytest

from analysis.answers.next_steps import NEXT_STEPS, NEXT_STEPS_OF_LOOPS, next_step, next_steps
from bench.record.record import Status
from tests.support.cells import make_cell
from tests.support.records import make_failure


def test_next_steps_has_one_line_per_status(cells_of):
    assert {*NEXT_STEPS} == {*Status} - {Status.OK}
    statuses = [*NEXT_STEPS, *NEXT_STEPS]
    failures = [
        make_failure(status, "why", config={"seq_len": 1024 * n}) for n, status in enumerate(statuses, 1)
    ]
    lines = next_steps(cells_of(failures))
    assert len(lines) == len(NEXT_STEPS)
    oom = next(line for line in lines if "OOM" in line)
    assert oom.startswith("Next step after OOM: ")
    assert "to fit more, try a higher sp_degree" in oom
    assert "memory_limit" not in oom


def test_next_steps_of_loops_name_no_key_and_no_log_of_ours(cells_of):
    ends = [
        make_failure(status, "why", config={"seq_len": 1024 * n}) | {"role": "observed"}
        for n, status in enumerate(NEXT_STEPS_OF_LOOPS, 1)
    ]
    lines = next_steps(cells_of(ends))
    assert len(lines) == len(NEXT_STEPS_OF_LOOPS)
    assert not any("=" in line or "cells/" in line or "seq_len" in line for line in lines)
    assert all(" in an observed loop: " in line for line in lines)


WAYS = {
    "checkpointing=true": (("model=qwen3_0_6b",), ("model=qwen3_0_6b", "checkpointing=true")),
    "loss=chunked": (("loss=untiled",), ()),
    "batch=1": (("batch=2",), ()),
    "cluster.memory_limit_gib": (("cluster.memory_limit_gib=0.2",), ()),
    "sp_degree": (("strategy=ring",), ("strategy=local",)),
    "strategy=ulysses or ring": (("strategy=local",), ("strategy=ring",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_next_step_after_oom_names_what_is_not_tried(way):
    is_open, is_closed = WAYS[way]
    assert way in next_step(Status.OUT_OF_MEMORY, [make_cell(*is_open).flat()])
    assert way not in next_step(Status.OUT_OF_MEMORY, [make_cell(*is_closed).flat()])
