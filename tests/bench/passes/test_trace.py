"""A traced step is booked once: compute by part, communication by purpose, waiting, and what is left."""

from dataclasses import replace

import pytest

from bench.config import OWN
from bench.passes import PASSES
from bench.passes.calls import COLLECTIVES
from bench.passes.facts import RankReport
from bench.passes.trace.cpu_timeline import GLOO_EVENTS, cpu_timeline
from bench.passes.trace.issued import other_calls
from bench.passes.trace.reader import read_tracks
from bench.passes.trace.section import RankSteps, traced_steps
from bench.passes.trace.split import flights_ms, split
from bench.passes.trace.timeline import JoinError
from bench.passes.trace.waiting import RankTrace
from tests.bench.passes.traces import MAIN, WORKER, annotation, call, event, mark, regions
from tests.cells import make_cell

approx = pytest.approx


def of_cpu(events, calls=(), **known):
    return cpu_timeline(read_tracks([mark(0), *events]), regions(**known), calls)


def test_a_call_seen_twice_and_sends_in_flight_together_are_not_summed():
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


def test_the_parts_of_a_step_add_up_to_it():
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
    booked = sum(found.compute_ms.values()) + found.exposed_ms + found.idle_ms
    assert booked == approx(found.step_ms)


def test_time_exposed_for_two_purposes_at_once_is_booked_for_the_first_only():
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


def test_a_wait_inside_an_operator_is_no_compute():
    timeline = of_cpu([event("aten::mul", 0, 10), event("_c10d_functional::wait_tensor", 1, 9)], step=(0, 10))
    assert split(timeline).compute_ms["other"] == approx(2)


def test_the_copies_of_gloos_own_threads_are_no_compute():
    timeline = of_cpu(
        [
            event("c10d::_allgather_base_", 0, 1), annotation("gloo:all_gather", 0, 10),
            event("aten::copy_", 2, 8, tid=WORKER),
        ],
        [call("all_gather", "parameters")], step=(0, 10),
    )  # fmt: skip
    assert split(timeline).exposed_ms == approx(10)


def test_a_call_that_a_dispatch_mode_shows_twice_is_one():
    events = [event("c10d::allreduce_", 0, 2), event("c10d::allreduce_", 0.5, 1.5)]
    events.append(annotation("gloo:all_reduce", 1, 5))
    timeline = of_cpu(events, [call("all_reduce", "gradients")], step=(0, 10))
    assert split(timeline).calls == {"all_reduce": 1}


def test_gloos_all_reduce_for_a_reduce_scatter_is_booked_as_what_was_asked_for():
    events = [
        event("c10d::_reduce_scatter_base_", 0, 1), annotation("gloo:all_reduce", 1, 5),
        event("c10d::allreduce_", 6, 7), annotation("gloo:all_reduce", 7, 9),
    ]  # fmt: skip
    calls = [call("reduce_scatter", "gradients"), call("all_reduce", "data_and_loss")]
    found = split(of_cpu(events, calls, step=(0, 10)))
    assert found.communication_ms == {"reduce_scatter": approx(4), "all_reduce": approx(2)}
    assert found.purpose_total_ms == {"gradients": approx(4), "data_and_loss": approx(2)}


def test_calls_that_the_tap_did_not_see_are_not_guessed_at():
    events = [event("c10d::allreduce_", 0, 1), annotation("gloo:all_reduce", 0, 5)]
    with pytest.raises(JoinError, match="the tap saw"):
        of_cpu(events, [], step=(0, 10))
    assert split(of_cpu(events, None, step=(0, 10))).purpose_total_ms == {"other": approx(5)}


def ranks(*arrivals, send=False, computing=(), end=100):
    """One exchange of attention on each rank, which comes to it at its arrival and leaves at `end`."""
    traces = []
    for rank, arrival in enumerate(arrivals):
        name = ("c10d::send", "c10d::recv_")[rank] if send else "c10d::alltoall_base_"
        transfer = ("gloo:send", "gloo:recv")[rank] if send else "gloo:all_to_all"
        kind = ("send", "recv")[rank] if send else "all_to_all"
        members = (0, 1) if send else tuple(range(len(arrivals)))
        timeline = of_cpu(
            [
                event(name, arrival, arrival + 0.1), annotation(transfer, arrival, end),
                *(event("aten::mm", *span) for span in computing),
            ],
            [call(kind, "attention", members)], step=(0, 120),
        )  # fmt: skip
        traces.append(
            RankTrace(
                split=split(timeline),
                flights=flights_ms(timeline),
                clock="one host",
                unjoined=None,
                unmatched=None,
                other_calls=None,
            )
        )
    return traces


CELL = make_cell("strategy=ulysses", "cluster.world_size=2")


def merge_traces(traces, cell):
    return merge_steps([traces], cell)


def merge_steps(steps, cell, median=0):
    ranks = [RankSteps(steps=[*traces], median=median) for traces in zip(*steps, strict=True)]
    return PASSES["trace"].merge([RankReport({"trace": rank}, {}) for rank in ranks], cell)


def test_waiting_is_the_last_arrival_minus_ones_own():
    trace = merge_traces(ranks(10, 40), CELL)
    assert trace.purpose_waiting_ms == {"attention": [approx(30), approx(0)]}
    assert trace.purpose_exposed_waiting_ms == {"attention": [approx(30), approx(0)]}


def test_waiting_behind_compute_is_waiting_but_not_exposed():
    trace = merge_traces(ranks(10, 40, computing=[(20, 60)]), CELL)
    assert trace.purpose_waiting_ms["attention"][0] == approx(30)
    assert trace.purpose_exposed_waiting_ms["attention"][0] == approx(10)


def test_nobody_waits_longer_than_the_call_was_in_flight():
    assert merge_traces(ranks(10, 40, end=25)[:1] + ranks(10, 40)[1:], CELL).purpose_waiting_ms[
        "attention"
    ] == [approx(15), approx(0)]


def test_a_send_meets_its_receive():
    assert merge_traces(ranks(10, 40, send=True), CELL).purpose_waiting_ms["attention"][0] == approx(30)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clock": "another host"}, "the ranks' clocks cannot be compared: they run on several hosts"),
        ({"unmatched": "no tap"}, "rank 1: no tap"),
        ({"flights": []}, "all_to_all 0 of ranks 0, 1 was found on 1 of them"),
    ],
)
def test_what_cannot_be_compared_has_no_waiting_and_says_why(change, said):
    first, second = ranks(10, 40)
    trace = merge_traces([first, replace(second, **change)], CELL)
    assert (trace.purpose_waiting_ms, trace.waiting_unknown) == (None, said)
    assert trace.purpose_exposed_ms["attention"] == [approx(90), approx(60)]


def test_a_section_is_of_the_median_step_and_keeps_every_other_beside_it():
    steps = [ranks(10, 40), ranks(10, 15), ranks(20, 10)]
    trace = merge_steps(steps, CELL, median=1)
    assert trace.purpose_exposed_waiting_ms == {"attention": [approx(5), approx(0)]}
    waited = [step.purpose_exposed_waiting_ms["attention"] for step in trace.steps]
    assert waited == [[approx(30), approx(0)], [approx(5), approx(0)], [approx(0), approx(10)]]
    assert trace.steps[1].purpose_exposed_ms == trace.purpose_exposed_ms


def test_a_step_whose_waiting_is_unknown_costs_the_others_nothing():
    first, second = ranks(10, 40)
    trace = merge_steps([[first, replace(second, unmatched="no tap")], ranks(10, 40)], CELL, median=1)
    assert [step.purpose_exposed_waiting_ms is None for step in trace.steps] == [True, False]


ISSUED = [event("c10d::allreduce_", 0, 1), event("c10d::alltoall_base_", 2, 3), event("c10d::send", 4, 5)]
INSPECTED = [call("all_reduce", "gradients"), call("all_to_all", "attention"), call("send", "attention")]


@pytest.mark.parametrize(
    ("events", "calls", "said"),
    [
        (ISSUED, INSPECTED, None),
        ([], [], None),
        (ISSUED[::2], INSPECTED, "it made 0 calls of all_to_all, the inspected step 1 (attention)"),
        (ISSUED, INSPECTED[:2], "it made 1 calls of send, the inspected step 0"),
        ([*ISSUED, event("c10d::send", 200, 201)], INSPECTED, None),
    ],
    ids=["equal", "none", "one less", "one more", "one after the step"],
)
def test_the_first_kind_of_call_that_a_traced_step_made_more_or_less_often_is_named(events, calls, said):
    assert other_calls(read_tracks([mark(0), *events]), regions(step=(0, 100)), calls) == said


def with_other_calls(cell):
    first, second = ranks(10, 40)
    steps = [ranks(10, 40), [first, replace(second, other_calls="it made 0 calls of send")]]
    return PASSES["trace"].gate(cell, merge_steps(steps, cell))


def test_ranks_that_call_otherwise_when_nobody_inspects_them_are_a_wrong_result():
    assert with_other_calls(CELL).startswith("rank 1, traced step 1: it made 0 calls of send; ")


def test_somebodys_own_loop_may_do_other_things_every_few_steps():
    assert with_other_calls(replace(CELL, trainer=OWN)) is None


@pytest.mark.parametrize(
    ("budget_s", "step_s", "steps"),
    [(20, 0.1, 5), (20, 2, 5), (20, 2.1, 4), (20, 9, 1), (20, 40, 1), (0, 40, 5)],
)
def test_short_steps_are_traced_five_times_and_long_ones_as_half_the_budget_allows(budget_s, step_s, steps):
    assert traced_steps(replace(CELL.measure, budget_s=budget_s), step_s) == steps


def test_gloos_name_is_known_of_every_kind_that_the_tap_counts():
    assert {collective.kind for collective in COLLECTIVES.values()} <= GLOO_EVENTS.keys()


def test_a_kind_that_nobody_knows_the_name_of_is_not_joined_and_no_error_of_its_own():
    with pytest.raises(JoinError, match="what gloo calls the transfers of all_to_some"):
        of_cpu([event("c10d::alltoall_base_", 0, 1)], [call("all_to_some", "other")], step=(0, 50))
