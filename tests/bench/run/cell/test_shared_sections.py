"""A check is shared by cells exactly if it would do the same in each of them."""

import pytest
from rich.console import Console

from bench.plan.plan import plan
from bench.record.store import Store
from bench.request.composition import compose_words
from bench.run.cell.run import SharedSections
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import TINY, TWO_CORES, run_cell, tiny_cell

BASE = ("strategy=ulysses", "engine=ddp")
SAME = ["seq_len=2k", "engine=fsdp2", "measure.steps=2", "checkpointing=true", "data=synthetic"]
OTHER = [
    "strategy=ring",
    "dtype=fp32",
    "kernel=math",
    "cluster.world_size=4",
    "batch=2",
    "seq_len=128",
]


@pytest.fixture(scope="module")
def shared(launcher, tmp_path_factory):
    cell = tiny_cell(*BASE, "seq_len=1k")
    record, _ = run_cell(launcher, cell, tmp_path_factory.mktemp("cell"))
    shared = SharedSections()
    shared.remember(cell, record)
    return shared


@pytest.mark.parametrize("word", SAME)
def test_parity_is_shared_by_cells_it_cannot_tell_apart(shared, word):
    assert shared.sections_for(tiny_cell(*BASE, "seq_len=1k", word))


@pytest.mark.parametrize("word", OTHER)
def test_parity_is_not_shared_if_the_difference_matters(shared, word):
    assert not shared.sections_for(tiny_cell(*BASE, "seq_len=1k", word))


def test_a_sweep_checks_equal_cells_once_and_records_where(launcher, tmp_path):
    raws = [compose_words(*TINY, *BASE, f"seq_len={n}", f"sweep_dir={tmp_path}") for n in ("512", "1k", "2k")]
    planned, quiet = plan(raws, TWO_CORES, single=False), Progress(Console(quiet=True))
    assert run_plan(planned, launcher, quiet, write_report=lambda _: True) == 0
    with Store(tmp_path) as store:
        records = store.read()
    assert {record.parity.checked_cell for record in records} == {planned.cells[0].cell.cell_id}
