"""The call log has every call of a step, also sends over gloo, and no span with missing calls."""

import time

import torch
import torch.distributed as dist

from bench.measure.engagement import call_log
from bench.measure.engagement.call_log import calls_by_span, recorded_sends
from bench.run.node.worker import join
from tests.support.cells import tiny_cell


def make_calls(job, log):
    """Report a rank's calls in two spans, with and without the recorder."""
    join(job)
    method, ones, spans = vars(dist.ProcessGroup)["send"], torch.ones(4), []
    with recorded_sends() as sends:
        for calls in (1, 2):
            start = time.time_ns()
            for _ in range(calls):
                dist.all_to_all_single(torch.empty(4), ones)
                operations = [(dist.isend, ones, 1 - job.rank), (dist.irecv, torch.empty(4), 1 - job.rank)]
                for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
                    work.wait()
            spans.append((start, time.time_ns()))
    assert vars(dist.ProcessGroup)["send"] is method
    before = calls_by_span(spans, sends)
    call_log.DUMPS = {}  # as in a torch without the function
    return {"before": before, "unknown": calls_by_span(spans, []), "sends": len(sends)}


def test_call_log_counts_collectives_and_sends(launcher, tmp_path):
    ends = launcher.run(tiny_cell("cluster.world_size=2"), tmp_path, entry=make_calls)
    for end in ends:
        assert end.report is not None, end.log_tail
        (first, second), sends = end.report["before"], end.report["sends"]
        assert sends == 3
        assert [call.partition(" of ")[0] for call in first] == ["all_to_all", "send"]
        assert [*first.values()] == [1, 1]
        assert second == dict.fromkeys(first, 2)
        assert end.report["unknown"] == [{}, {}]


def drop_calls(job, log):
    join(job)
    spans = []
    for calls in (1, 2000):
        start = time.time_ns()
        for _ in range(calls):
            dist.all_reduce(torch.ones(1))
        spans.append((start, time.time_ns()))
    return {"spans": calls_by_span([*spans, (time.time_ns(), time.time_ns())], [])}


def test_call_log_says_nothing_about_a_span_with_dropped_calls(launcher, tmp_path):
    (end, *_) = launcher.run(tiny_cell("cluster.world_size=2"), tmp_path, entry=drop_calls)
    assert end.report is not None, end.log_tail
    first, second, third = end.report["spans"]
    assert (first, third) == (None, {})
    assert second is None or sum(second.values()) == 2000
