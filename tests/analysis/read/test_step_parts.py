"""The parts of a step: each by its formula, together the traced step."""

import pytest
from msgspec import convert

from analysis.cells.parts import parts_of, step_ms
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL, step_parts
from bench.measure.trace.section import TraceSection
from tests.support.records import make_failure, make_record, make_trace, metrics_of


def as_trace(section):
    """The section as it is read from a record."""
    return convert(section, TraceSection)


def with_attention(*attention_ms):
    """Ranks of one step length; what one computes less in attention it waits for."""
    most = max(attention_ms)
    trace = make_trace(len(attention_ms), most)
    exchange = [7.0 + most - own for own in attention_ms]
    waiting = [3.0 + most - own for own in attention_ms]
    trace["compute_ms"] |= {"attention": list(attention_ms)}
    trace["purpose_exposed_ms"] |= {"attention": exchange}
    return trace | {"purpose_exposed_waiting_ms": {"attention": waiting}}


def test_without_known_waiting_the_exchange_is_transfer():
    parts = step_parts(as_trace(make_trace(2, purpose_exposed_waiting_ms=None, purpose_waiting_ms=None)))
    assert (parts.transfer, parts.waiting) == (7.0, 0.0)
    assert parts.step_ms == pytest.approx(110)


def test_a_cpu_names_no_device_copies(summary_of):
    copies = {"packing": [1.0] * 2, "optimizer": [2.0] * 2, "other": [3.0] * 2}
    named = [
        [part.label for part, _ in parts_of(summary_of([make_record(trace=each)]).iloc[0])]
        for each in (make_trace(2, copies_ms=copies), make_trace(2))
    ]
    assert ["device copies" in labels for labels in named] == [True, False]


def test_local_exchanges_nothing():
    local = make_trace(1, purpose_total_ms={}, purpose_exposed_ms={})
    metrics = metrics_of(make_record(trace=local))
    assert (metrics.attention_in_flight_share, metrics.attention_exposed_share) == (0, 0)


def test_purposes_that_are_not_known_have_no_share():
    trace = make_trace(2, purposes_unknown=[None, "the tap saw 1, not 2"])
    metrics = metrics_of(make_record(trace=trace))
    assert metrics.attention_in_flight_share is None
    assert metrics.communication_in_flight_share == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("cluster", "capacity"),
    [
        ({}, 2),
        ({"cluster.device": "cpu", "hardware": "cpu", "cluster.threads_per_rank": 1}, 1),
        ({"cluster.ranks_per_gpu": 2}, 1),
    ],
)
def test_ideal_attention_is_locals_over_the_cores_or_gpus(summary_of, cluster, capacity):
    local = {"cluster.threads_per_rank": 2, "cluster.ranks_per_gpu": 1} if cluster else {}
    summary = summary_of(
        [
            make_record(config=cluster | {"strategy": "local"} | local, trace=make_trace(1, 40.0)),
            make_record(config=cluster),
        ]
    ).set_index("strategy")
    assert summary.loc["local", [IDEAL, BEYOND_IDEAL]].tolist() == [40, 0]
    assert summary.loc["ulysses", [IDEAL, BEYOND_IDEAL]].tolist() == [40 / capacity, 60 - 40 / capacity]


@pytest.mark.parametrize("other", [{"seq_len": 4096}, {"kernel": "math"}, {"engine": "ddp"}])
def test_there_is_no_ideal_without_a_local_cell_of_the_same_work(summary_of, other):
    summary = summary_of([make_record(config={"strategy": "local"} | other), make_record()])
    assert summary.set_index("strategy").loc["ulysses", [IDEAL, BEYOND_IDEAL]].isna().all()


def test_repeats_show_one_step_whose_parts_add_up(summary_of):
    steps = [make_record(repeat=n, trace=with_attention(*ms)) for n, ms in enumerate([(60, 40), (50, 59)])]
    cell = summary_of(steps).iloc[0]
    assert step_ms(cell) == pytest.approx(110)
    assert cell["part_attention_ms"] == 50


def test_a_failed_repeat_does_not_cost_the_others_parts(summary_of):
    cell = summary_of([make_failure("killed", "by whom?"), make_record(repeat=1)]).iloc[0]
    assert step_ms(cell) == pytest.approx(110)
