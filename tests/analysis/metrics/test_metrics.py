import pytest

from analysis.metrics.measured import communication_share, worst_rank
from analysis.metrics.recorded import Trace
from tests.analysis.records import make_record, make_timing, make_trace, metrics_of


def test_step_time_is_the_median_of_slowest_ranks_not_the_slowest_of_medians():
    metrics = metrics_of(make_record(timing=make_timing([[10.0, 10.0, 40.0], [40.0, 10.0, 10.0]])))
    assert metrics.step_time_ms == 40.0


def test_tokens_per_s_divides_the_step_s_tokens_by_the_median_step_or_all_by_the_slowest_window():
    timing = make_timing([[100.0, 200.0, 300.0]] * 2, 1000) | {"window_ms": [700.0, 750.0]}
    metrics = metrics_of(make_record(timing=timing))
    assert metrics.tokens_per_s == pytest.approx(5000)
    assert metrics.tokens_per_s_per_rank == pytest.approx(2500)
    assert metrics.window_tokens_per_s == pytest.approx(4000)


def test_the_slow_end_of_the_steps_is_the_low_end_of_tokens_per_s():
    steps = [[100.0, 125.0, 130.0, 130.0, 140.0, 150.0, 160.0, 200.0, 400.0]]
    metrics = metrics_of(make_record(timing=make_timing(steps, 1000)))
    assert metrics.tokens_per_s_low == pytest.approx(5000)
    assert metrics.tokens_per_s_high == pytest.approx(8000)


def test_peak_memory_is_the_worst_rank_s_and_missing_is_none_not_zero():
    assert worst_rank([3, None, 7]) == 7
    assert worst_rank([None, None]) is worst_rank(None) is None


def test_resident_above_base_subtracts_each_rank_s_own_base():
    memory = {"peak_resident_bytes": [500, 600], "base_resident_bytes": [100, 350]}
    assert metrics_of(make_record(memory=memory)).resident_above_base_bytes == 400


def test_share_is_the_worst_rank_s_time_over_that_rank_s_own_step():
    share = communication_share(Trace(step_ms=[100.0, 200.0], total_ms=[40.0, 60.0], exposed_ms=[30.0, 20.0]))
    assert share.total == pytest.approx(0.3)
    assert share.exposed == pytest.approx(0.3)


def test_a_trace_over_1_2_times_the_timed_step_has_neither_shares_nor_parts_and_says_so():
    metrics = metrics_of(make_record(trace=make_trace(2, step_ms=[121.0, 100.0])))
    assert (
        metrics.communication_share is metrics.attention_exchange_share is metrics.part_attention_ms is None
    )
    assert metrics.straggler_gap_ms is None
    assert "1.21 times" in metrics.note


@pytest.mark.parametrize(
    ("column", "source"),
    [
        ("mfu_causal", "model_flops_causal"),
        ("mfu_full", "model_flops_full"),
        ("hfu_causal", "hardware_flops_causal"),
        ("hfu_full", "hardware_flops_full"),
    ],
)
def test_a_utilisation_is_its_own_flops_over_step_time_ranks_and_peak(column, source):
    metrics = metrics_of(make_record(analytic={source: 10**13}))
    assert getattr(metrics, column) == pytest.approx(1e13 / (0.1 * 2 * 1e15))


@pytest.mark.parametrize("config", [{"hardware": "cpu"}, {"dtype": "fp32"}])
def test_there_is_no_mfu_without_a_peak_for_that_hardware_and_dtype(config):
    assert metrics_of(make_record(config=config)).mfu_causal is None


def test_a_wrong_result_has_nothing_but_its_reason_even_where_it_was_timed():
    metrics = metrics_of(make_record(status="wrong_result", reason="dq is off"))
    assert (metrics.tokens_per_s, metrics.part_attention_ms, metrics.note) == (None, None, "dq is off")


def test_a_short_warm_up_is_noted():
    timing = make_timing([[1.0]] * 2) | {"warmup": "short"}
    assert "shorter steps" in metrics_of(make_record(timing=timing, trace=None)).note
