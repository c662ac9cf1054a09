"""Timeline, split and waiting of a CPU step, and the trace section of all ranks."""

from dataclasses import replace

import pytest

from bench.measure import PASSES
from bench.measure.calls import COLLECTIVES
from bench.measure.facts import RankReport
from bench.measure.trace.cpu_timeline import GLOO_EVENTS, cpu_timeline
from bench.measure.trace.section import RankTracedSteps, traced_steps
from bench.measure.trace.split import split
from tests.support.cells import make_cell
from tests.support.traces import (
    MAIN,
    WORKER,
    annotation,
    call,
    event,
    rank_trace,
    timeline_of,
)

approx = pytest.approx


def of_cpu(events, calls=(), **moments):
    return timeline_of(cpu_timeline, events, calls, **moments)


def test_overlapping_communication_is_counted_once():
    timeline = of_cpu(
        [
            event("c10d::alltoall_base_", 0, 1),
            annotation("gloo:all_to_all", 0, 10),
            event("c10d::send", 20, 20.1), event("c10d::recv_", 22, 22.1),
            annotation("gloo:send", 20, 30, MAIN), annotation("gloo:recv", 22, 34, MAIN),
            event("aten::mm", 24, 40), event("FakeBackward0", 0, 40),
        ],
        [call("all_to_all", "other"), call("send", "attention"), call("recv", "attention", (1, 0))],
        step=(0, 50),
    )  # fmt: skip
    found = split(timeline)
    assert found.communication_ms == {"all_to_all": approx(10), "send_recv": approx(14)}
    assert found.purpose_total_ms == {"other": approx(10), "attention": approx(14)}
    assert (found.total_ms, found.exposed_ms) == (approx(24), approx(14))
    assert found.calls == {"all_to_all": 1, "send_recv": 2}


def test_split_parts_add_up_to_the_step():
    timeline = of_cpu(
        [
            event("aten::linear", 0, 10), event("aten::mm", 1, 9),
            event("aten::repeat_interleave", 10, 12), event("aten::cumsum", 10.5, 11),
            event("c10d::alltoall_base_", 12, 12.5), annotation("gloo:all_to_all", 12, 20),
            event("aten::_scaled_dot_product_flash_attention_for_cpu", 20, 50), event("aten::copy_", 21, 22),
            event("aten::add_", 70, 90),
            event("c10d::allreduce_", 60, 61), annotation("gloo:all_reduce", 60, 75),
        ],
        [call("all_to_all", "attention"), call("all_reduce", "gradients")],
        step=(0, 100), attention=[(10, 55)], optimizer=[(65, 95)],
    )  # fmt: skip
    found = split(timeline)
    assert found.compute_ms == {
        "attention": approx(30), "packing": approx(2), "optimizer": approx(20), "other": approx(10),
    }  # fmt: skip
    assert {purpose: sum(e - s for s, e in spans) for purpose, spans in found.exposed_spans_ms.items()} == {
        "attention": approx(8), "gradients": approx(10),
    }  # fmt: skip
    assert found.idle_ms == approx(20)
    total_ms = sum(found.compute_ms.values()) + found.exposed_ms + found.idle_ms
    assert total_ms == approx(found.step_ms)


def test_time_exposed_for_two_purposes_counts_for_the_first():
    timeline = of_cpu(
        [
            event("c10d::_allgather_base_", 0, 1), annotation("gloo:all_gather", 0, 20),
            event("c10d::alltoall_base_", 5, 6), annotation("gloo:all_to_all", 5, 15),
        ],
        [call("all_gather", "parameters"), call("all_to_all", "attention")],
        step=(0, 20),
    )  # fmt: skip
    found = split(timeline)
    assert found.purpose_total_ms == {"parameters": approx(20), "attention": approx(10)}
    assert found.exposed_spans_ms == {"attention": [(5, 15)], "parameters": [(0, 5), (15, 20)]}


def test_waits_inside_operators_and_gloo_copies_are_no_compute():
    timeline = of_cpu(
        [
            event("c10d::_allgather_base_", 0, 1), event("c10d::_allgather_base_", 0.2, 0.8),
            annotation("gloo:all_gather", 0, 10), event("aten::copy_", 2, 8, tid=WORKER),
            event("aten::mul", 10, 20), event("_c10d_functional::wait_tensor", 11, 19),
        ],
        [call("all_gather", "parameters")], step=(0, 20),
    )  # fmt: skip
    found = split(timeline)
    assert (found.exposed_ms, found.compute_ms["other"]) == (approx(10), approx(2))
    assert found.calls == {"all_gather": 1}  # a dispatch mode makes one call appear twice


def test_gloo_all_reduce_counts_as_the_reduce_scatter_it_does():
    events = [
        event("c10d::_reduce_scatter_base_", 0, 1), annotation("gloo:all_reduce", 1, 5),
        event("c10d::allreduce_", 6, 7), annotation("gloo:all_reduce", 7, 9),
    ]  # fmt: skip
    calls = [call("reduce_scatter", "gradients"), call("all_reduce", "data_and_loss")]
    found = split(of_cpu(events, calls, step=(0, 10)))
    assert found.communication_ms == {"reduce_scatter": approx(4), "all_reduce": approx(2)}
    assert found.purpose_total_ms == {"gradients": approx(4), "data_and_loss": approx(2)}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "the tap recorded the calls {}, the profiler {'all_reduce': 1}"),
        ([call("all_reduce", "other")], "the trace has 1 calls and 2 events named gloo:all_reduce"),
    ],
)
def test_unmatched_calls_have_no_known_purpose(calls, reason):
    events = [event("c10d::allreduce_", 0, 1), annotation("gloo:all_reduce", 0, 5)]
    events += [annotation("gloo:all_reduce", 6, 7)]
    timeline = of_cpu(events, calls, step=(0, 10))
    assert timeline.unmatched == timeline.purposes_unknown == reason
    assert split(timeline).purpose_total_ms == {"other": approx(6)}


def ranks(*arrivals, send=False, computing=(), ends=(100, 100)):
    """Return two ranks' traces with one all-to-all or send of attention, from its arrival to its end."""
    traces = []
    for rank, (arrival, end) in enumerate(zip(arrivals, ends, strict=True)):
        name = ("c10d::send", "c10d::recv_")[rank] if send else "c10d::alltoall_base_"
        kind = ("send", "recv")[rank] if send else "all_to_all"
        timeline = of_cpu(
            [
                event(name, arrival, arrival + 0.1), annotation(f"gloo:{kind}", arrival, end),
                *(event("aten::mm", *span) for span in computing),
            ],
            [call(kind, "attention")], step=(0, 120),
        )  # fmt: skip
        traces.append(rank_trace(timeline))
    return traces


CELL = make_cell("strategy=ulysses", "cluster.world_size=2")


def merge_steps(steps, cell, median=0):
    ranks = [RankTracedSteps(steps=[*traces], median=median) for traces in zip(*steps, strict=True)]
    return PASSES["trace"].merge([RankReport({"trace": rank}, {}) for rank in ranks], cell)


@pytest.mark.parametrize(
    ("options", "waited", "exposed"),
    [
        ({}, 30, 30),
        ({"computing": [(20, 60)]}, 30, 10),
        ({"ends": (25, 100)}, 15, 15),
        ({"send": True}, 30, 30),
    ],
    ids=["until the last arrival", "behind compute", "while in flight at most", "receive for its send"],
)
def test_waiting_lasts_from_arrival_to_last_arrival(options, waited, exposed):
    trace = merge_steps([ranks(10, 40, **options)], CELL)
    assert trace.purpose_waiting_ms == {"attention": [approx(waited), approx(0)]}
    assert trace.purpose_exposed_waiting_ms == {"attention": [approx(exposed), approx(0)]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clock": "another host"}, "the ranks run on several hosts, whose clocks were not compared"),
        ({"unmatched": "no tap"}, "rank 1: no tap"),
        ({"communications": []}, "all_to_all number 0 of ranks 0, 1 is in the traces of 1 of these ranks"),
    ],
)
def test_waiting_is_unknown_if_traces_cannot_be_compared(change, reason):
    first, second = ranks(10, 40)
    trace = merge_steps([[first, replace(second, **change)]], CELL)
    assert (trace.purpose_waiting_ms, trace.waiting_unknown) == (None, reason)
    assert trace.purpose_exposed_ms["attention"] == [approx(90), approx(60)]


def test_section_describes_the_median_step_and_lists_all():
    first, second = ranks(10, 40)
    unknown = [first, replace(second, unmatched="no tap")]
    trace = merge_steps([ranks(10, 40), ranks(10, 15), ranks(20, 10), unknown], CELL, median=1)
    assert trace.purpose_exposed_waiting_ms == {"attention": [approx(5), approx(0)]}
    waited = [step.purpose_exposed_waiting_ms for step in trace.steps]
    assert [ms and ms["attention"] for ms in waited] == [
        [approx(30), approx(0)], [approx(5), approx(0)], [approx(0), approx(10)], None,
    ]  # fmt: skip
    assert trace.steps[1].purpose_exposed_ms == trace.purpose_exposed_ms


@pytest.mark.parametrize(
    ("budget_s", "step_s", "steps"),
    [(20, 0.1, 5), (20, 2, 5), (20, 2.1, 4), (20, 9, 1), (20, 40, 1), (0, 40, 5)],
)
def test_traced_steps_fit_half_the_budget_and_are_at_most_five(budget_s, step_s, steps):
    assert traced_steps(replace(CELL.measure, budget_s=budget_s), step_s) == steps


def test_gloo_events_has_every_kind_of_the_tap():
    assert {collective.kind for collective in COLLECTIVES.values()} <= GLOO_EVENTS.keys()
