"""The barrier of an observation waits a limited time for a missing rank, and never ends the training."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch.distributed as dist

import bench
from bench.extras.observe import loop_ranks
from bench.extras.observe.loop_ranks import (
    LONGEST_WAIT_S,
    AbortableBarrier,
    PeerStoppedError,
)
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.scripts import own_loop


@pytest.fixture
def impatient_group(tmp_path):
    """Process group whose collectives time out after one second."""
    where = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=1))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("impatient_group")
def test_barrier_waits_half_the_timeout_of_a_collective_once():
    first, late = (AbortableBarrier("test", [0, 1]) for _ in range(2))
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks.* within 0\.5 s"):
        first.wait()
    with pytest.raises(PeerStoppedError):
        late.wait()
    assert LONGEST_WAIT_S <= 600 / 2  # half of the default timeout of NCCL


def observe_on_rank_0_alone(job, log):
    """Return the losses of an unobserved loop, and of one that only rank 0 observes."""
    join(job)
    loop_ranks.LONGEST_WAIT_S = 0.5
    observe = bench.observe
    losses = {}
    for name, observing in (("plain", ()), ("alone", (0,))):
        bench.observe = observe if job.rank in observing else lambda *_, **__: nullcontext()
        losses[name] = own_loop.train(job.folder / name, steps=3)
    return losses


def test_rank_that_observes_alone_reports_it_and_trains_on(launcher, tmp_path):
    cell = make_cell("strategy=ring", "cluster.world_size=2")
    ends = launcher.run(cell, tmp_path, entry=observe_on_rank_0_alone)
    for end in ends:
        assert end.report["alone"] == end.report["plain"]
        assert len(end.report["plain"]) == 3
    log = (tmp_path / "rank_0.log").read_text()
    for part in ("the training continues", "TimeoutError", "1 of 2 ranks", "0.5 s"):
        assert part in log
