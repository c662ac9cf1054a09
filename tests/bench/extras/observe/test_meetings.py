"""A rank that says nothing is waited for, but not for ever, and no training ends for it."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch.distributed as dist

import bench
from bench.extras.observe import loop_ranks as meetings
from bench.extras.observe.loop_ranks import LONGEST_WAIT_S, Meetings, PeerMissingError, PeerStoppedError
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.scripts import own_loop


@pytest.fixture
def impatient_group(tmp_path):
    """One whose collectives wait a second."""
    where = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=1))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("impatient_group")
def test_a_rank_waits_half_as_long_as_a_collective_and_the_next_not_at_all():
    first, late = (Meetings("test", [0, 1]) for _ in range(2))
    with pytest.raises(PeerMissingError, match=r"1 of 2 ranks came to this point within 0\.5 s"):
        first.hold()
    with pytest.raises(PeerStoppedError):
        late.hold()
    assert LONGEST_WAIT_S <= 600 / 2  # half of what NCCL lets the training wait by default


def observe_on_rank_0_alone(job, log):
    """The losses of a loop that nobody observes, and of one that rank 1 knows nothing of."""
    join(job)
    meetings.LONGEST_WAIT_S = 0.5
    observe = bench.observe
    found = {}
    for name, observing in (("plain", ()), ("alone", (0,))):
        bench.observe = observe if job.rank in observing else lambda *_, **__: nullcontext()
        found[name] = own_loop.train(job.folder / name, steps=3)
    return found


def test_a_rank_that_observes_alone_says_so_and_trains_on(launcher, tmp_path):
    cell = make_cell("strategy=ring", "cluster.world_size=2")
    ends = launcher.run(cell, tmp_path, entry=observe_on_rank_0_alone)
    for end in ends:
        assert end.report["alone"] == end.report["plain"]
        assert len(end.report["plain"]) == 3
    said = (tmp_path / "rank_0.log").read_text()
    assert "the training goes on: PeerMissingError: 1 of 2 ranks came to this point within 0.5 s" in said
