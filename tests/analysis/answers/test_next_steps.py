"""Every way a cell can end tells what to do next, and nothing that is done already is proposed."""

import pytest

from analysis.answers.next_steps import NEXT_STEPS, OF_OBSERVED, next_step, next_steps
from bench.record.record import Status
from tests.support.cells import make_cell
from tests.support.records import make_failure


def test_a_report_says_it_once_per_status(cells_of):
    assert {*NEXT_STEPS} == {*Status} - {Status.OK}
    statuses = [*NEXT_STEPS, *NEXT_STEPS]
    failures = [make_failure(each, "why", config={"seq_len": 1024 * n}) for n, each in enumerate(statuses, 1)]
    lines = next_steps(cells_of(failures))
    assert len(lines) == len(NEXT_STEPS)
    oom = next(line for line in lines if "OOM" in line)
    assert oom.startswith("What to do, OOM: where it no longer fits")
    assert "memory_limit" not in oom


def test_an_observed_loop_is_told_nothing_of_our_command_line_or_logs(cells_of):
    ends = [
        make_failure(each, "why", config={"seq_len": 1024 * n}) | {"role": "observed"}
        for n, each in enumerate(OF_OBSERVED, 1)
    ]
    lines = next_steps(cells_of(ends))
    assert len(lines) == len(OF_OBSERVED)
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
def test_out_of_memory_proposes_what_the_cell_has_not_tried(way):
    is_open, is_closed = WAYS[way]
    assert way in next_step(Status.OUT_OF_MEMORY, [make_cell(*is_open).flat()])
    assert way not in next_step(Status.OUT_OF_MEMORY, [make_cell(*is_closed).flat()])
