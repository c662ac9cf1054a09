"""A number that is not finite makes a wrong result, and never prevents writing the record."""

import copy
import json
import math
from datetime import UTC, datetime

import pytest
import torch

from bench.common.finite import find_not_finite, largest_error, replace_not_finite
from bench.measure import decode_reports
from bench.measure.parity.exact import relative_error
from bench.measure.parity.section import parity_limit
from bench.measure.timing.section import TimingSection
from bench.plan.planned import PlannedCell
from bench.record.store import Store
from bench.run.cell.outcome import completed_record, record_of
from bench.run.node.ranks import RankEnd
from tests.support.cells import make_cell, run_cell, tiny_cell

CELL = make_cell("strategy=ulysses", "seq_len=512", "engine=ddp")
SPLIT = {
    "step_ms": 2.0, "total_ms": 1.0, "exposed_ms": 0.5, "communication_ms": {"all_to_all": 1.0}, "calls": {},
    "purpose_total_ms": {"attention": 1.0},
    "compute_ms": {"attention": 0.5, "packing": 0.0, "optimizer": 0.0, "other": 0.0}, "idle_ms": 0.5,
    "exposed_spans_ms": {"attention": [[0.0, 0.5]]}, "copies_ms": {"other": 0.1},
}  # fmt: skip
CALL = {
    "kind": "all_to_all", "purpose": "attention", "group": "0", "members": [0, 1], "ordinal": 0,
    "sent_bytes": 0, "arrival_ns": 0,
}  # fmt: skip
FLIGHT = {"call": CALL, "arrival": 0.0, "start": 0.0, "end": 1.0}
STEP = {
    "split": SPLIT, "start_us": 0.0, "communications": [FLIGHT], "clock": "one",
    "purposes_unknown": None, "unmatched": None,
}  # fmt: skip
TELEMETRY = {
    "cpus": ["0"],
    "reason": None, "sample_ms": [[0.5]], "power_w": [[300.0]], "sm_clock_mhz": [[1500.0]],
    "reference_clock_mhz": [1980.0], "utilisation": [[0.9]], "device_used_bytes": [[1e9]],
    "clock_events": [[]], "other_processes": [0], "throttled": False, "load_average": 1.0,
    "involuntary_context_switches": [3],
}  # fmt: skip
LOSSES = {
    "loss_sums": [[10.0, 9.0]], "loss": [5.0, 4.5], "grad_norm": [1.0, 1.5], "valid_tokens": [4, 4],
    "tokens_digest": ["a", "b"], "expected_digest": ["a", "b"],
}  # fmt: skip
REPORT = {
    "timing": {"step_times_ms": [[1.0, 2.0]], "window_ms": [3.0], "warmup": "full"},
    "parity": {"tokens": 512, "errors": {"out": 1e-3}, "limits": {"out": 2e-2}},
    "losses": LOSSES,
    "telemetry": TELEMETRY,
    "full_length": {
        "tokens": 512, "rows": 32, "errors": {"out": 1e-3, "dk": 1e-3}, "limits": {"out": 2e-2, "dk": 2e-2},
    },
    "trace": {"steps": [STEP], "median": 0},
    "phases_s": {"timing": 1.0},
}  # fmt: skip
"""Report of a rank with all sections that contain floats."""


def places(value, path=()):
    """Path to every float in a report."""
    if isinstance(value, float):
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*path, name))


def record_with(number, path):
    """Record of two ranks of which rank 1 reports `number` at `path`."""
    reports = [copy.deepcopy(REPORT), copy.deepcopy(REPORT)]
    *way, last = path
    section = reports[1]
    for name in way:
        section = section[name]
    section[last] = number
    ends = [RankEnd(rank, 0, report, None, "") for rank, report in enumerate(reports)]
    return record_of(PlannedCell(CELL, repeat=0, order=0), ends, 9.0, datetime.now(UTC), {})


PLACES = [path for path in places(REPORT) if path[0] != "phases_s"]


NUMBERS = (math.nan, math.inf, -math.inf)
CASES = [(path, NUMBERS[number % 3]) for number, path in enumerate(PLACES)]


@pytest.mark.parametrize(("path", "number"), CASES)
def test_number_that_is_not_finite_makes_a_wrong_result(tmp_path, path, number):
    with Store(tmp_path) as store:
        store.append(record_with(number, path))
        (line,) = store.read()
    assert line.status == "wrong_result"
    assert line.reason.startswith(
        (f"rank 1: {path[0]}", "losses: the ", "attention parity: out", "attention at")
    )
    assert line.timing is None


def test_number_that_breaks_a_sections_rule_makes_a_wrong_result():
    record = record_with(-1.0, ("timing", "window_ms", 0))
    assert (record.status, record.timing) == ("wrong_result", None)
    assert record.reason.startswith("rank 1: timing: ")
    assert "> 0.0 - at `$.window_ms[0]`" in record.reason


def test_report_with_finite_numbers_is_ok():
    record = record_with(1.0, ("timing", "window_ms", 0))
    assert (record.status, record.reason) == ("ok", None)


def test_not_finite_names_numbers_and_finite_makes_them_null():
    found = find_not_finite({"a": [{"b": (1.0, math.nan)}], "c": -math.inf, "d": None}, "section")
    assert [*found] == ["section.a[0].b[1] is nan", "section.c is -inf"]
    values = {"a": [1.0, math.nan, {"b": math.inf}], "c": "nan", "d": None, "e": True}
    assert replace_not_finite(values) == {"a": [1.0, None, {"b": None}], "c": "nan", "d": None, "e": True}
    json.dumps(replace_not_finite(values), allow_nan=False)


@pytest.mark.parametrize("errors", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.nan, 1.0)])
def test_worst_is_nan_in_any_order(errors):
    assert not largest_error(errors) <= 1e300


@pytest.mark.parametrize("plain", [math.nan, math.inf])
def test_limit_is_finite_if_plain_arithmetic_overflows(plain):
    assert parity_limit("out", "bf16", plain) == 2.0


def test_merged_section_that_is_not_finite_is_a_wrong_result():
    timing = TimingSection(step_times_ms=[[1.0]], window_ms=[math.inf], warmup="full", tokens_per_step=1)
    planned, reports = (
        PlannedCell(CELL, repeat=0, order=0),
        decode_reports([{"phases_s": {}, "software": {}}]),
    )
    record = completed_record(planned, reports, {"timing": timing}, [], None, 1.0, datetime.now(UTC))
    assert record.status == "wrong_result"
    assert record.reason.startswith("timing.window_ms[0] is inf")


def test_relative_error_of_zeros_is_zero():
    zeros = torch.zeros(1, 1, 1, 8)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros + 1e-9, zeros) == pytest.approx(1e-9)
    assert relative_error(zeros + math.nan, zeros) == math.inf
    assert relative_error(zeros, zeros + math.nan) == math.inf


@pytest.mark.parametrize("workload", ["train", "attention"])
def test_cell_of_one_token_runs(launcher, tmp_path, workload):
    cell = tiny_cell("strategy=local", "seq_len=1", "engine=ddp", f"workload={workload}")
    record, _ = run_cell(launcher, cell, tmp_path)
    assert (record.status, record.reason) == ("ok", None)
