"""The process groups of a cell: the ranks in each, and how long their collectives may take."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.ranks.groups import deadline, make_groups, outwait_the_launcher
from tests.support.cells import make_cell

WORDS = ("strategy=usp", "cluster.world_size=8", "sp_degree=4", "ulysses_degree=2", "dp_shard=2")


@pytest.fixture
def last_of_eight():
    """A process group of eight ranks of which this is the last; its collectives carry nothing."""
    dist.init_process_group("fake", rank=7, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranks_of(groups):
    names = ("sequence", "ulysses", "ring")
    return {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}


@pytest.mark.parametrize(
    ("inner", "ulysses", "ring"), [("ulysses", [6, 7], [5, 7]), ("ring", [5, 7], [6, 7])]
)
def test_neighbours_in_rank_are_of_the_inner_group(last_of_eight, inner, ulysses, ring):
    cell = make_cell(*WORDS, f"strategy.inner={inner}")
    assert ranks_of(make_groups(cell)) == {"sequence": [4, 5, 6, 7], "ulysses": ulysses, "ring": ring}


def test_groups_of_some_ranks_wait_as_long_as_the_cell_may_take(last_of_eight, monkeypatch):
    told = []
    new_group = dist.new_group

    def noted(ranks=None, timeout=None, **keywords):
        told.append(timeout)
        return new_group(ranks, timeout, **keywords)

    monkeypatch.setattr("torch.distributed.distributed_c10d.new_group", noted)
    cell = make_cell(*WORDS, "measure.timeout_s=5000")
    make_groups(cell)
    assert told == [deadline(cell)] * 10
    assert deadline(cell).total_seconds() > 5000


def test_groups_that_an_engine_or_a_package_made_wait_as_long(tmp_path):
    """NCCL's own watchdog would end a rank of a long step after ten minutes."""
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=5))
    try:
        groups = [dist.group.WORLD, dist.new_group([0], timeout=timedelta(seconds=6))]
        cell = make_cell(*WORDS, "measure.timeout_s=5000")
        outwait_the_launcher(cell)
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        assert {each._timeout for each in options} == {deadline(cell)}
    finally:
        dist.destroy_process_group()
