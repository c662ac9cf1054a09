"""An error in the observation of one rank, or a missing rank, does not change the training."""

import errno
import io
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

import bench
from bench.extras.observe import (
    attention_check,
    loop_ranks,
    observation,
    observed_record,
    tokens,
    trained_tokens,
)
from bench.measure.engagement.rank import EngagementPass
from bench.measure.tap import CommunicationTap
from bench.measure.trace import rank as trace
from bench.record.store import Store
from bench.run.node.worker import join
from tests.support.cells import make_cell
from tests.support.records import read_lines
from tests.support.scripts import own_loop

ERROR_TEXT, STEPS = "an error of the observation", 9


def fail(*_, **__):
    raise ArithmeticError(ERROR_TEXT)


def find_no_room(*_, **__):
    raise OSError(errno.ENOSPC, ERROR_TEXT)


PARTS = {
    "what is needed before the first step": (1, observation, "observed_model", fail),
    "the context of an inspected step": (1, EngagementPass, "around_inspected_step", fail),
    "what the model is fed": (1, tokens, "tensor_arguments", fail),
    "collectives": (1, CommunicationTap, "_call", fail),
    "attention": (1, attention_check, "compare", fail),
    "reading the trace": (1, trace.StepTracer, "read", fail),
    "logits before backward": (1, trained_tokens, "_gradient_reader", fail),
    "judging": (0, observed_record, "observed_record", fail),
    "writing the record": (0, Store, "append", find_no_room),
    "the report": (0, observed_record, "write_report", find_no_room),
}
"""Parts that fail: the rank, the object and attribute that is replaced, and the replacement."""
WITHOUT_RECORD = ("what is needed before the first step", "what the model is fed", "writing the record")
AFTER_THE_LAST_BARRIER = ("judging", "writing the record", "the report")
ALONE = "rank 0 observes alone"


def train_with_errors(job, log):
    """Train one unobserved loop, one loop for each part that fails, and one that only rank 0 observes."""
    join(job)
    results = {}
    for part in (None, *PARTS, ALONE):
        output = io.StringIO()
        with redirect_stderr(output), redirect_stdout(output), fault(part):
            losses = own_loop.train(job.folder / str(part), "stated", steps=STEPS, report=True, timed_steps=1)
        results[str(part)] = {"losses": losses, "output": output.getvalue()}
    return {"results": results}


@contextmanager
def fault(part):
    if part in (None, ALONE):
        is_observed = part == ALONE and dist.get_rank() == 0
        observe = bench.observe if is_observed else lambda *_, **__: nullcontext()
        with patch.object(bench, "observe", observe), patch.object(loop_ranks, "LONGEST_WAIT_S", 0.5):
            yield
        return
    rank, owner, name, replacement = PARTS[part]
    with (
        patch.object(observed_record, "write_report", lambda _: None),
        patch.object(owner, name, replacement) if dist.get_rank() == rank else nullcontext(),
    ):
        yield


@pytest.fixture(scope="module")
def results(launcher, tmp_path_factory):
    """Return the results of every rank by the part that failed, and the folder."""
    folder = tmp_path_factory.mktemp("own errors")
    cell = make_cell("strategy=ring", "cluster.world_size=2")
    ends = launcher.run(cell, folder, entry=train_with_errors)
    assert all(end.report for end in ends), [end.failure or end.log_tail for end in ends]
    return [end.report["results"] for end in ends], folder


@pytest.mark.parametrize("part", PARTS)
def test_observation_error_changes_no_loss_and_is_printed_once(results, part):
    ranks, folder = results
    for of_rank in ranks:
        assert len(of_rank["None"]["losses"]) == STEPS
        assert of_rank[part]["losses"] == of_rank["None"]["losses"]
    rank = PARTS[part][0]
    output = ranks[rank][part]["output"]
    messages = [line for line in output.splitlines() if ERROR_TEXT in line]
    assert len(messages) == 1, output
    assert messages[0].startswith("bench.observe: ")
    if part not in AFTER_THE_LAST_BARRIER:
        peer = "the training continues; reason: PeerStoppedError: another rank stopped observing"
        assert peer in ranks[1 - rank][part]["output"]
    path = folder / part / "records.jsonl"
    records = read_lines(path) if path.exists() else []
    assert len(records) == (part not in WITHOUT_RECORD)
    for record in records:
        if part == "the report":
            assert record["reason"] is None
            assert "the record was written, but no report; reason: " in messages[0]
        else:
            assert record["reason"].endswith(f"{ERROR_TEXT} (in bench.observe, not in the training loop)")
            assert record["failure"]["rank"] == rank


def test_rank_that_observes_alone_reports_it_and_trains_on(results):
    ranks, _ = results
    assert all(of_rank[ALONE]["losses"] == of_rank["None"]["losses"] for of_rank in ranks)
    for text in ("the training continues", "TimeoutError", "1 of 2 ranks", "0.5 s"):
        assert text in ranks[0][ALONE]["output"]


def test_barrier_waits_half_the_timeout_of_a_collective_once():
    timeout = timedelta(seconds=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        first, late = (loop_ranks.AbortableBarrier("test", [0, 1]) for _ in range(2))
        with pytest.raises(TimeoutError, match=r"1 of 2 ranks.* within 0\.5 s"):
            first.wait()
        with pytest.raises(loop_ranks.PeerStoppedError):
            late.wait()
    finally:
        dist.destroy_process_group()
    assert loop_ranks.LONGEST_WAIT_S <= 600 / 2  # half of the default timeout of NCCL
