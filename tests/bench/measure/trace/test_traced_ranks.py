"""Traces of real ranks, compared with times that are known beforehand or from the tap."""

import functools
import json
from collections import defaultdict
from itertools import chain, cycle

import pytest

from analysis.read.step_parts import step_parts
from analysis.read.traced_shares import traced_shares
from bench.measure import PASSES, decode_reports
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import CHECKS, INSTALLED, make_cell, run_cell, tiny_cell
from tests.support.trace_cases import PROFILER_STARTS_LATE_S, SLEEP_S, TRACED, Case, trace_case

SLEEP_MS = SLEEP_S * 1e3
TOLERANCE = 0.1
CLOSE_MS = TOLERANCE * SLEEP_MS
"""Largest difference between the trace and the tap. The tap is compared, not the time a rank slept, because a
rank on a busy machine runs late and its trace has to show that."""


@pytest.fixture(scope="module")
def traced(launcher, tmp_path_factory):
    """Return a function that runs a case once and returns its trace section, ranks' parts and folder."""

    @functools.cache
    def traced(case, ranks):
        cell = make_cell("strategy=ring", f"cluster.world_size={ranks}")
        folder = tmp_path_factory.mktemp("traced") / case.__name__
        ends = launcher.run(cell, folder, entry=trace_case)
        assert all(end.report for end in ends), ends[0].log_tail
        reports = decode_reports([end.report for end in ends])
        trace = PASSES["trace"].merge(reports, cell)
        assert len(trace.steps) == TRACED
        assert PASSES["trace"].gate(cell, trace) is None
        return trace, PASSES["trace"].parts(reports), folder

    return traced


def tapped_waiting_ms(folder, ranks):
    """Return waiting in attention by traced step and rank, from the arrivals that the tap recorded."""
    by_rank = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(ranks)]
    last = defaultdict(int)
    for call in chain.from_iterable(by_rank):
        last[meeting(call)] = max(last[meeting(call)], call["arrival_ns"])
    count = len(by_rank[0]) // TRACED
    return [
        [longest_ms(calls[step * count : (step + 1) * count], last) for calls in by_rank]
        for step in range(TRACED)
    ]


def meeting(call):
    return call["purpose"], tuple(call["members"]), call["ordinal"]


def longest_ms(calls, last):
    return max(
        (last[meeting(call)] - call["arrival_ns"]) / 1e6 for call in calls if call["purpose"] == "attention"
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_wait_for_a_sleeping_rank_and_transfer_little(traced, ranks):
    trace, _, folder = traced(Case.sleep_before_all_to_all, ranks)
    waited = tapped_waiting_ms(folder, ranks)
    for step, expected in zip(trace.steps, waited, strict=True):
        assert step.purpose_exposed_waiting_ms["attention"] == pytest.approx(expected, abs=CLOSE_MS)
    assert trace.purpose_waiting_ms["attention"] == pytest.approx(waited[trace.median_step], abs=CLOSE_MS)
    assert trace.purpose_exposed_waiting_ms["attention"][0] <= trace.purpose_exposed_ms["attention"][0]
    assert trace.idle_ms[1] > SLEEP_MS
    shares = traced_shares(trace, None)
    assert shares.steps == TRACED
    parts = [sum(ms) / sum(step.step_ms) for ms, step in zip(waited, trace.steps, strict=True)]
    assert shares.attention.waiting.low == pytest.approx(min(parts), rel=TOLERANCE)
    assert shares.attention.waiting.high == pytest.approx(max(parts), rel=TOLERANCE)
    assert 0 <= shares.attention.transfer.low < TOLERANCE / 2


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_communication_behind_compute_is_not_exposed(traced, ranks):
    trace, _, _ = traced(Case.hide_all_reduce_behind_compute, ranks)
    for rank in range(ranks):
        total, exposed = trace.purpose_total_ms["gradients"][rank], trace.exposed_ms[rank]
        assert total > 0
        # Until the first product starts, and between two of them, a little stays exposed.
        assert exposed < TOLERANCE * trace.step_ms[rank]


def test_late_profiler_start_is_not_counted_as_waiting(traced):
    trace, _, folder = traced(Case.pass_on_late, 4)
    waited = tapped_waiting_ms(folder, 4)
    assert trace.purpose_waiting_ms["attention"] == pytest.approx(waited[trace.median_step], abs=CLOSE_MS)
    assert trace.calls == {"send_recv": [2] * 4}
    # No step begins before all profilers have started, so no rank waits for rank 1 in every step.
    assert min(by_rank[2] for by_rank in waited) < PROFILER_STARTS_LATE_S * 1e3 / 2


def test_tap_and_profiler_use_one_clock(traced):
    _, traces, folder = traced(Case.sleep_before_all_to_all, 2)
    for rank, trace in enumerate(traces):
        calls = json.loads((folder / f"calls-{rank}.json").read_text())
        profiled = sorted(span.arrival for step in trace.steps for span in step.communications)
        assert len(profiled) == len(calls) == 2 * TRACED
        for call, arrival_us in zip(calls, profiled, strict=True):
            # Another process may run between the two for milliseconds; other clocks are seconds apart.
            assert abs(call["arrival_ns"] / 1e3 - arrival_us) < 20_000


KINDS = ("data.prompt_tokens=300", "checkpointing=true", "grad_accum=2 batch=2")
"""Settings that change the kind of training step."""
ENGINES = sorted(ENGINE_FACTS)
KINDS_AND_ENGINES = [(kind, ENGINES[(i + j) % 3]) for j in range(3) for i, kind in enumerate(KINDS)]
"""All pairs of a kind and an engine; neighbouring pairs have different engines."""
CELLS = {
    f"{name} {kind} {engine}": (f"strategy={name}", f"engine={engine}", *kind.split())
    for name, (kind, engine) in zip(INSTALLED, cycle(KINDS_AND_ENGINES), strict=False)
}
LONG = "a long step, traced and tapped at once"
TRACED_OF_CELL = {LONG: 1}
CELLS[LONG] = ("strategy=ring", "engine=fsdp2", "measure.budget_s=0.001")


COVERED = ("usp", "ring_flash_attn ", "ring_self_attention", "deepspeed_fpdt")
"""Cells whose kinds of collectives other cells have too."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.startswith(COVERED) else ()) for case in CELLS]
)
def test_cell_trace_matches_all_calls_and_adds_up(launcher, tmp_path, case):
    cell = tiny_cell(*CELLS[case], "measure.trace=true", "cluster.world_size=2", "seq_len=512")
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    assert record.status == "ok", record.reason
    trace = record.trace
    assert trace.purposes_unknown == [None] * cell.cluster.world_size
    assert trace.waiting_unknown is None
    assert len(trace.steps) == TRACED_OF_CELL.get(case, TRACED)
    assert trace.is_inspected == (case == LONG)
    assert trace.steps[trace.median_step].step_ms == trace.step_ms
    assert trace.steps[trace.median_step].purpose_exposed_ms == trace.purpose_exposed_ms
    for rank, step_ms in enumerate(trace.step_ms):
        total_ms = sum(times[rank] for times in trace.compute_ms.values())
        total_ms += sum(times[rank] for times in trace.purpose_exposed_ms.values()) + trace.idle_ms[rank]
        assert total_ms == pytest.approx(step_ms, rel=0.02)
        assert trace.compute_ms["attention"][rank] > 0
        assert trace.compute_ms["optimizer"][rank] > 0
    busiest = max(range(len(trace.step_ms)), key=trace.compute_ms["attention"].__getitem__)
    parts = step_parts(trace)
    assert parts.step_ms == pytest.approx(trace.step_ms[busiest], rel=0.02)
    communicates = "attention" in trace.purpose_total_ms and min(trace.purpose_total_ms["attention"]) > 0
    assert communicates == (cell.sp_degree > 1)
