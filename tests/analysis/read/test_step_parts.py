"""Parts of a step, by their formulas and in sum."""

import pytest
from msgspec import convert

from analysis.cells.parts import parts_of, step_ms
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL, step_parts
from bench.measure.trace.section import TraceSection
from tests.support.records import make_failure, make_record, make_trace, metrics_of


def as_trace(section):
    """Return the section as the analysis reads it from a record."""
    return convert(section, TraceSection)


def with_attention(*attention_ms):
    """Return a trace of ranks with equal steps, where a rank waits while others compute attention."""
    most = max(attention_ms)
    trace = make_trace(len(attention_ms), most)
    exposed = [7.0 + most - ms for ms in attention_ms]
    waiting = [3.0 + most - ms for ms in attention_ms]
    trace["compute_ms"] |= {"attention": list(attention_ms)}
    trace["purpose_exposed_ms"] |= {"attention": exposed}
    return trace | {"purpose_exposed_waiting_ms": {"attention": waiting}}


def test_unknown_waiting_counts_as_transfer_in_parts():
    parts = step_parts(as_trace(make_trace(2, purpose_exposed_waiting_ms=None, purpose_waiting_ms=None)))
    assert (parts.transfer, parts.waiting) == (7.0, 0.0)
    assert parts.step_ms == pytest.approx(110)


def test_parts_without_device_copies_on_a_cpu(summary_of):
    copies = {"packing": [1.0] * 2, "optimizer": [2.0] * 2, "other": [3.0] * 2}
    labels = [
        [part.label for part, _ in parts_of(summary_of([make_record(trace=trace)]).iloc[0])]
        for trace in (make_trace(2, copies_ms=copies), make_trace(2))
    ]
    assert ["device copies" in names for names in labels] == [True, False]


def test_local_has_no_attention_communication():
    local = make_trace(1, purpose_total_ms={}, purpose_exposed_ms={})
    metrics = metrics_of(make_record(trace=local))
    assert (metrics.attention_in_flight_share, metrics.attention_exposed_share) == (0, 0)


def test_unknown_purposes_have_no_share():
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
def test_ideal_attention_divides_local_by_cores_or_gpus(summary_of, cluster, capacity):
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
def test_no_ideal_attention_without_local_of_the_same_work(summary_of, other):
    summary = summary_of([make_record(config={"strategy": "local"} | other), make_record()])
    assert summary.set_index("strategy").loc["ulysses", [IDEAL, BEYOND_IDEAL]].isna().all()


def test_parts_of_repeats_are_of_one_step(summary_of):
    steps = [make_record(repeat=n, trace=with_attention(*ms)) for n, ms in enumerate([(60, 40), (50, 59)])]
    cell = summary_of(steps).iloc[0]
    assert step_ms(cell) == pytest.approx(110)
    assert cell["part_attention_ms"] == 50


def test_parts_despite_a_failed_repeat(summary_of):
    cell = summary_of([make_failure("killed", "why"), make_record(repeat=1)]).iloc[0]
    assert step_ms(cell) == pytest.approx(110)
