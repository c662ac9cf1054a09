"""Metrics that a record does not have; tests/test_doc_formulas.py tests the formulas of the pages."""

import pytest

from analysis.show.figures.figures import figures_for
from analysis.show.sections.cell_tables import ATTENTION_COLUMNS, attention_section
from tests.support.records import (
    make_failure,
    make_predicted,
    make_record,
    make_timing,
    make_trace,
    metrics_of,
    with_attention_calls,
    with_prediction,
)  # fmt: skip
from tests.support.sections import findings_of


def test_peak_memory_is_of_the_worst_rank_and_none_if_missing():
    metrics = metrics_of(make_record(memory={"peak_allocated_bytes": [3, 7]}))
    assert (metrics.peak_allocated_bytes, metrics.peak_reserved_bytes) == (7, None)


def test_void_trace_has_no_shares_and_no_parts_but_a_note():
    metrics = metrics_of(make_record(trace=make_trace(2, step_ms=[121.0, 100.0])))
    assert (
        metrics.communication_in_flight_share
        is metrics.attention_in_flight_share
        is metrics.part_attention_ms
        is None
    )
    assert metrics.straggler_gap_ms is None
    assert "1.21 times" in metrics.note


@pytest.mark.parametrize("config", [{"hardware": "cpu"}, {"dtype": "fp32"}])
def test_no_mfu_without_a_peak_for_hardware_and_dtype(config):
    assert metrics_of(make_record(config=config)).mfu_causal is None


def test_wrong_result_has_a_reason_and_no_numbers():
    metrics = metrics_of(make_record(status="wrong_result", reason="dq is off"))
    assert (metrics.tokens_per_s, metrics.part_attention_ms, metrics.note) == (None, None, "dq is off")


def test_short_warm_up_has_a_note():
    timing = make_timing([[1.0]] * 2) | {"warmup": "short"}
    assert "shorter steps" in metrics_of(make_record(timing=timing, trace=None)).note


def test_failed_cell_keeps_its_prediction():
    found = metrics_of(with_prediction(make_failure("out_of_memory", "no room"), fit="out_of_memory"))
    assert (found.predicted_fit, found.predicted_step_time_ms) == ("out_of_memory", 100.0)
    assert found.step_time_ms is None


@pytest.mark.parametrize("band", [(2.0, 1.0, 3.0), (1.0, 3.0, 2.0), (0.0, 1.0, 2.0)])
def test_band_out_of_order_or_at_zero_is_refused(band):
    with pytest.raises(ValueError, match="Expected"):
        metrics_of(make_predicted(step_ms=band))


def attention_record(**calls):
    config = {"sp_degree": 2, "cluster.world_size": 2, "workload": "attention"}
    return with_attention_calls(make_record(config=config) | {"losses": None}, **calls)


def test_attention_of_one_device_needs_one_device_times(summary_of):
    record = attention_record(one_device_forward_ms=None, one_device_backward_ms=None)
    assert summary_of([record]).iloc[0][["attention_of_one_device"]].isna().all()


def test_attention_table_and_figures_have_attention_cells_only(tmp_path):
    trained = findings_of(tmp_path / "trained", [make_record()])
    alone = findings_of(tmp_path / "alone", [make_record(), attention_record()])
    assert attention_section(trained) is None
    assert [len(row) for row in attention_section(alone).table.rows] == [len(ATTENTION_COLUMNS)]
    assert {*figures_for(alone.cells)} - {*figures_for(trained.cells)} == {
        "attention_of_one_device",
        "error_growth",
    }


def powered(samples, **overrides):
    telemetry = {"power_w": [[500.0] * samples, [300.0] * samples]}
    return make_record(
        timing=make_timing([[1000.0] * 8] * 2, 8000) | {"window_ms": [7900.0, 8000.0]},
        telemetry=telemetry,
        **overrides,
    )


@pytest.mark.parametrize(
    ("record", "tokens_per_joule"),
    [
        (powered(6), 10.0),
        (powered(5), None),
        (powered(6, config={"cluster.ranks_per_gpu": 2}), 20.0),
        (powered(6, provenance="replayed"), None),
        (make_record(), None),
    ],
)
def test_tokens_per_joule_needs_six_power_samples_of_all_gpus(record, tokens_per_joule):
    """8,000 tokens a second on 800 W; two ranks of one GPU both sample it."""
    assert metrics_of(record).tokens_per_joule == tokens_per_joule


def test_gpu_hours_count_a_shared_gpu_once_and_no_cpu():
    hours = [
        metrics_of(powered(6, config=config)).gpu_hours_per_billion_tokens
        for config in ({}, {"cluster.ranks_per_gpu": 2}, {"cluster.device": "cpu"})
    ]
    assert hours == [pytest.approx(2e9 / 8000 / 3600), pytest.approx(1e9 / 8000 / 3600), None]
    assert metrics_of(powered(6, provenance="replayed")).gpu_hours_per_billion_tokens is None
