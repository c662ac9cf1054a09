"""Shares of transfer and waiting in several traced steps, and void steps."""

import pytest
from msgspec import convert

from analysis.read.notes import PURPOSES_UNKNOWN
from analysis.read.traced_shares import traced_shares
from bench.measure.trace.section import TraceSection
from tests.support.records import make_record, make_step, make_trace, metrics_of

TIMED_MS = 100.0


def shares_of(*steps, timed_ms=TIMED_MS):
    return traced_shares(convert(make_trace(2, steps=[*steps]), TraceSection), timed_ms)


def with_steps(*steps, **overrides):
    return make_record(trace=make_trace(2, steps=[*steps], **overrides))


@pytest.mark.parametrize(("step_ms", "count"), [(79.0, 1), (80.0, 2), (120.0, 2), (121.0, 1)])
def test_traced_step_far_from_the_timed_step_is_void(step_ms, count):
    shares = shares_of(make_step([step_ms, 10.0]), make_step([100.0, 100.0]))
    assert (shares.steps, len(shares.void_ratios)) == (count, 2 - count)


def test_no_traced_step_is_void_without_a_timed_step():
    assert shares_of(make_step([500.0] * 2), timed_ms=None).steps == 1


def test_no_transfer_share_where_waiting_is_unknown():
    trace = make_trace(2, purpose_waiting_ms=None, purpose_exposed_waiting_ms=None)
    metrics = metrics_of(make_record(trace=trace))
    assert metrics.attention_transfer_share is None
    assert metrics.communication_waiting_share is None
    assert metrics.traced_steps == 1


@pytest.mark.parametrize(
    ("steps_ms", "said"),
    [
        (
            [110.0, 130.0, 60.0],
            "2 of 3 traced steps are left out: they took 0.60 to 1.30 times the timed step",
        ),
        ([60.0], "communication share excluded: the traced step took 0.60 times the timed step"),
        ([130.0, 140.0], "communication share excluded: all 2 traced steps took 1.30 to 1.40 times"),
        ([110.0, 90.0], None),
    ],
)
def test_note_counts_void_traced_steps_with_their_ratios(steps_ms, said):
    note = metrics_of(with_steps(*(make_step([ms] * 2) for ms in steps_ms))).note
    assert note is None if said is None else said in note


def test_note_on_other_calls_even_if_every_step_is_void():
    far = make_step([200.0] * 2)
    assert (
        PURPOSES_UNKNOWN
        in metrics_of(with_steps(far, purposes_unknown=["the tap saw 1", None], step_ms=[200.0] * 2)).note
    )


def test_shares_of_repeats_have_the_ends_of_all_steps(summary_of):
    of_one, other_positions = (
        [make_step([100.0] * 2, exposed_ms=[ms] * 2, waiting_ms=[0.0] * 2) for ms in each]
        for each in ((2.0, 3.0, 6.0), (1.0, 7.0))
    )
    steps = [of_one, [*other_positions, make_step([130.0] * 2)], [make_step([130.0] * 2)]]
    records = [with_steps(*each) | {"repeat": number} for number, each in enumerate(steps)]
    cell = summary_of(records).iloc[0]
    assert cell["attention_transfer_share"] == pytest.approx((0.03 + 0.04) / 2)
    assert cell["attention_transfer_low_share"] == pytest.approx(0.01)
    assert cell["attention_transfer_high_share"] == pytest.approx(0.07)
    assert (cell["traced_steps"], cell["void_traced_steps"]) == (5, 2)
