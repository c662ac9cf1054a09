"""Every way a cell can end tells what to do next, and proposes nothing that is done already."""

import pytest

from bench.next_steps import NEXT_STEPS, next_step
from bench.record import Status
from tests.cells import make_cell


def test_every_status_but_ok_has_a_next_step_of_one_line():
    assert set(NEXT_STEPS) == set(Status) - {Status.OK}
    assert not any("\n" in text or not text.strip() for text in NEXT_STEPS.values())


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
