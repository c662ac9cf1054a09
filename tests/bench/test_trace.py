"""Communication is read from a trace by merged intervals, whatever overlaps and nests."""

import pytest

from bench.measure.intervals import length, overlap, union
from bench.measure.trace import SOURCES, read_trace


def span(name, start, end, cat="user_annotation"):
    return {"ph": "X", "name": name, "cat": cat, "ts": start * 1e3, "dur": (end - start) * 1e3}


def test_overlapping_and_nested_spans_are_counted_once():
    assert union([(5, 6), (0, 3), (1, 2), (2, 4)]) == [(0, 4), (5, 6)]
    assert length([(5, 6), (0, 3), (1, 2), (2, 4)]) == 5


def test_overlap_is_the_time_that_both_cover():
    assert overlap([(0, 10)], [(2, 3), (5, 20)]) == 6
    assert overlap([(0, 1)], [(1, 2)]) == 0


def test_a_call_seen_twice_and_sends_in_flight_together_are_not_summed():
    step = read_trace(
        [
            span("c10d::alltoall_base_", 0, 1, "cpu_op"),
            span("gloo:all_to_all", 0, 10),
            span("gloo:send", 20, 30),
            span("gloo:recv", 22, 34),
            span("aten::mm", 24, 40, "cpu_op"),
            span("FakeBackward0", 0, 40, "cpu_op"),
        ],
        step_ms=50.0,
        source=SOURCES["cpu"],
    )
    assert step.communication_ms == {"all_to_all": pytest.approx(10), "send_recv": pytest.approx(14)}
    assert step.total_ms == pytest.approx(24)
    assert step.exposed_ms == pytest.approx(14)
    assert step.calls == {"all_to_all": 1, "send_recv": 2}


def test_on_a_gpu_kernels_count_and_the_calls_that_launch_them_do_not():
    step = read_trace(
        [
            span("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 10, "kernel"),
            span("flash_fwd_kernel", 2, 8, "kernel"),
            span("aten::mm", 0, 10, "cpu_op"),
        ],
        step_ms=20.0,
        source=SOURCES["cuda"],
    )
    assert step.communication_ms == {"send_recv": pytest.approx(10)}
    assert step.exposed_ms == pytest.approx(4)
