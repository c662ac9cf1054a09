"""Timeline of a GPU step: kernels are split by their launches, NCCL kernels matched with communication calls.

Four traces come from an H100. All other events are synthetic, in Kineto's format: names, arguments and the
nesting of call, launch and kernel follow public traces from A100 and B200. Times are in ms.
"""

import gzip
import json

import pytest

from bench.common.environment import REPOSITORY
from bench.measure.trace.cuda_timeline import NO_KERNELS, cuda_timeline
from bench.measure.trace.reader import TraceError, read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import CLOCK_MARK, StepRegions, issued_calls
from bench.measure.trace.waiting import compute_waiting
from tests.support.traces import (
    WORKER,
    call,
    event,
    hop,
    kernel,
    nccl,
    rank_trace,
    timeline_of,
)

approx = pytest.approx


def of_cuda(events, calls=(), **moments):
    return timeline_of(cuda_timeline, events, calls, **moments)


STEP = [
    *nccl("c10d::_allgather_base_", "AllGather_RING_LL", 5, 25, 0.5, 1),
    *kernel("ampere_bf16_gemm", 10, 20, 1, 2),
    event("aten::clone", 2, 2.5),
    *kernel("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", 25, 28, 2.1, 3),
    *nccl("c10d::alltoall_base_", "SendRecv", 28, 40, 3, 4),
    event("aten::_scaled_dot_product_flash_attention", 3.9, 4.5),
    event("aten::contiguous", 4, 4.2),
    *kernel("pytorch_flash::flash_fwd_kernel", 40, 60, 4, 5),
    *nccl("c10d::_reduce_scatter_base_", "ReduceScatter_Sum_f32_RING_LL", 55, 75, 6, 6, WORKER),
    *nccl("c10d::allreduce_", "AllReduce_Sum_f32_RING_LL", 80, 82, 7, 7),
    *kernel("multi_tensor_apply_kernel<FusedAdam>", 82, 90, 8, 8),
]  # fmt: skip
TAPPED = [
    call("all_gather", "parameters"), call("all_to_all", "attention"),
    call("reduce_scatter", "gradients"), call("all_reduce", "data_and_loss"),
]  # fmt: skip


@pytest.mark.parametrize("calls", [TAPPED, TAPPED[:3]], ids=["matched", "by name and launch"])
def test_kernels_are_split_by_the_place_of_their_launch(calls):
    """The size of an unmatched kernel is unknown, so a small all-reduce counts as gradients."""
    timeline = of_cuda(STEP, calls, step=(0, 100), attention=[(2, 5)], optimizer=[(6.5, 9)])
    found = split(timeline)
    small = {"data_and_loss": approx(2)} if calls is TAPPED else {}
    gradients = 0 if small else 2
    assert (timeline.unmatched is None, timeline.purposes_unknown) == (bool(small), None)
    assert found.purpose_total_ms == {
        "parameters": approx(20), "attention": approx(12), "gradients": approx(20 + gradients), **small,
    }  # fmt: skip
    assert {purpose: sum(e - s for s, e in spans) for purpose, spans in found.exposed_spans_ms.items()} == {
        "parameters": approx(10), "attention": approx(12), "gradients": approx(15 + gradients), **small,
    }  # fmt: skip
    assert found.compute_ms == {
        "attention": approx(20), "packing": approx(3), "optimizer": approx(8), "other": approx(10),
    }  # fmt: skip
    assert found.communication_ms["all_to_all" if small else "send_recv"] == approx(12)


def test_kernel_belongs_to_the_call_that_launched_it():
    # Older versions of NCCL name the kernels of other calls SendRecv too, and the profiler adds nothing.
    events = [event("c10d::allreduce_", 1, 2), *kernel("ncclKernel_SendRecv_RING_SIMPLE", 5, 9, 1.5, 1)]
    (communication,) = of_cuda(
        events, [call("all_reduce", "gradients", (0, 2), 3, "5")], step=(0, 10)
    ).communications
    assert communication.call == call("all_reduce", "gradients", (0, 2), 3, "5")
    assert communication.arrival == communication.start


H100 = REPOSITORY / "results/reference/h100/correctness"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("strategy", "kind"), [("ulysses", "all_to_all"), ("ring", "send_recv")])
def test_h100_trace_gives_the_times_of_its_record(strategy, kind, rank):
    """The barrier before the step does not belong to it; kernels of sends and receives have no ranks."""
    recorded = next(
        record["trace"]
        for record in map(json.loads, (H100 / "records.jsonl").read_text().splitlines())
        if (record["config"]["strategy"], record["config"]["seq_len"]) == (strategy, 4096)
    )
    trace = json.loads(gzip.decompress((H100 / f"traces/{strategy}-rank_{rank}.json.gz").read_bytes()))
    tracks = read_tracks(trace["traceEvents"])
    starts_us = max(mark["ts"] for mark in trace["traceEvents"] if mark["name"] == CLOCK_MARK)
    step_ns = round(starts_us * 1e3), round((starts_us + recorded["step_ms"][rank] * 1e3) * 1e3)
    regions = StepRegions(step_ns, [], [], [])
    timeline = cuda_timeline(tracks, regions, issued_calls(tracks["operators"], regions), [])
    found, kinds = split(timeline), [span.call.kind for span in timeline.communications]
    assert kinds.count("all_reduce") == recorded["calls"]["all_reduce"][rank]
    expected = {kind: times[rank] for kind, times in recorded["communication_ms"].items()}
    expected["send_recv"] = expected.pop(kind)
    assert found.communication_ms == approx(expected, abs=0.1)
    computed = sum(times[rank] for times in recorded["compute_ms"].values())
    assert sum(found.compute_ms.values()) == approx(computed, rel=0.01)


HOP = [
    [call("send", "attention", (0, 1)), call("recv", "attention", (1, 0))],
    [call("send", "attention", (1, 0)), call("recv", "attention", (0, 1))],
]
"""Calls of a ring of two, by rank."""
ONE_HOP = hop(10, 42, 1, 1)


def exposed_waiting(*ranks):
    """Return exposed waiting by purpose and rank, or why it is unknown; a rank is (events, calls)."""
    timelines = [of_cuda(events, calls, step=(0, 200)) for events, calls in ranks]
    found = compute_waiting([rank_trace(timeline) for timeline in timelines])
    return found if isinstance(found, str) else found.exposed_ms


def test_early_rank_of_a_ring_waits_for_the_late_one():
    late = (hop(30, 42, 5, 1), HOP[1])
    assert exposed_waiting((hop(10, 42, 1, 1), HOP[0]), late) == {"attention": [approx(20), approx(0)]}


def test_calls_of_two_groups_with_equal_ranks_do_not_meet():
    first, second = (call("all_reduce", "gradients", group=group) for group in ("0", "1"))
    assert first.rendezvous_key != second.rendezvous_key


@pytest.mark.parametrize(
    ("events", "calls", "reason"),
    [
        (ONE_HOP, HOP[0][:1], "the tap recorded the calls {'send': 1}, the profiler {'send': 1, 'recv': 1}"),
        ([*ONE_HOP[:2], ONE_HOP[3]], HOP[0], "lacks the launches of 1 of 1 NCCL kernels"),
        (
            [*ONE_HOP[:2], *kernel("ampere_bf16_gemm", 50, 60, 3, 2)],
            HOP[0],
            "2 calls launched no NCCL kernel, the first of kind send",
        ),
        (
            [*ONE_HOP, *kernel("ncclDevKernel_Generic", 50, 60, 3, 2, WORKER)],
            HOP[0],
            "by none of the step's calls",
        ),
        (
            [event("c10d::allreduce_", 0.9, 0.91), *ONE_HOP],
            [call("all_reduce", "other"), *HOP[0]],
            "a batch of 2 kinds or groups",
        ),
    ],
    ids=["counts", "lost launch", "no kernel", "no call", "two kinds"],
)
def test_unmatched_kernels_make_waiting_unknown(events, calls, reason):
    found = exposed_waiting((events, calls), (hop(30, 42, 5, 1), HOP[1]))
    assert isinstance(found, str)
    assert reason in found
    assert split(of_cuda(events, calls, step=(0, 200))).total_ms == approx(
        sum(e["dur"] for e in events if e["cat"] == "kernel" and "nccl" in e["name"]) / 1e3
    )


def test_call_among_one_rank_needs_no_kernel():
    events = [event("c10d::allreduce_", 0.5, 0.6), *hop(10, 42, 1, 1)]
    timeline = of_cuda(events, [call("all_reduce", "other", (0,)), *HOP[0]], step=(0, 50))
    assert timeline.unmatched is None
    assert {span.call.kind for span in timeline.communications} == {"send", "recv"}


def test_device_copies_hide_no_communication_and_are_no_compute():
    events = [
        *hop(0, 10, 0.1, 1),
        event("aten::mm", 0, 10),
        *kernel("gemm", 8, 12, 0.2, 2),
        *kernel("Memcpy DtoD (Device -> Device)", 4, 14, 0.3, 3, cat="gpu_memcpy"),
        *kernel("Memset (Device)", 15, 18, 1.5, 4, cat="gpu_memset"),
        *kernel("Memcpy HtoD (Pinned -> Device)", 17, 19, 2.5, 5, cat="gpu_memcpy"),
    ]
    found = split(of_cuda(events, HOP[0], step=(0, 20), attention=[(1, 2)], optimizer=[(2, 3)]))
    assert found.exposed_ms == approx(8)
    assert found.compute_ms["other"] == approx(4)
    assert found.copies_ms == {"packing": approx(3), "optimizer": approx(1), "other": approx(2)}
    assert found.idle_ms == approx(2)


def test_trace_without_kernels_is_an_error():
    """Another tool that holds CUPTI leaves the trace with operators and without device events."""
    operators = [event("aten::mm", 2, 3), event("c10d::allreduce_", 4, 5)]
    with pytest.raises(TraceError, match="no GPU kernel") as raised:
        of_cuda(operators, TAPPED, step=(0, 100))
    assert str(raised.value) == NO_KERNELS
