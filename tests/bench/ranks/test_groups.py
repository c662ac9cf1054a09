"""Process groups of a cell: their ranks, and the timeout of their collectives."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.ranks.groups import collective_timeout, extend_group_timeouts, make_groups
from tests.support.cells import make_cell

WORDS = ("strategy=usp", "cluster.world_size=8", "sp_degree=4", "ulysses_degree=2", "dp_shard=2")


@pytest.fixture
def last_of_eight():
    """Fake process group of eight ranks, of which this process is the last."""
    dist.init_process_group("fake", rank=7, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def ranks_of(groups):
    names = ("sequence", "ulysses", "ring")
    return {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}


@pytest.mark.parametrize(
    ("inner", "ulysses", "ring"), [("ulysses", [6, 7], [5, 7]), ("ring", [5, 7], [6, 7])]
)
def test_consecutive_ranks_form_the_inner_group(last_of_eight, inner, ulysses, ring):
    cell = make_cell(*WORDS, f"strategy.inner={inner}")
    assert ranks_of(make_groups(cell)) == {"sequence": [4, 5, 6, 7], "ulysses": ulysses, "ring": ring}


def test_subgroups_have_the_cells_timeout(last_of_eight, monkeypatch):
    timeouts = []
    new_group = dist.new_group

    def record_timeout(ranks=None, timeout=None, **keywords):
        timeouts.append(timeout)
        return new_group(ranks, timeout, **keywords)

    monkeypatch.setattr("torch.distributed.distributed_c10d.new_group", record_timeout)
    cell = make_cell(*WORDS, "measure.timeout_s=5000")
    make_groups(cell)
    assert timeouts == [collective_timeout(cell)] * 10
    assert collective_timeout(cell).total_seconds() > 5000


def test_outwait_the_launcher_sets_the_timeout_of_all_groups(tmp_path):
    """NCCL's watchdog would otherwise end a rank after ten minutes of a long step."""
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=5))
    try:
        groups = [dist.group.WORLD, dist.new_group([0], timeout=timedelta(seconds=6))]
        cell = make_cell(*WORDS, "measure.timeout_s=5000")
        extend_group_timeouts(cell)
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        assert {option._timeout for option in options} == {collective_timeout(cell)}
    finally:
        dist.destroy_process_group()
