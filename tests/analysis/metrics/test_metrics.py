import math

import pytest

from analysis.metrics.measured import communication_share, slowest_rank_ms, worst_rank
from analysis.metrics.recorded import Trace
from bench.statistics import interval_rank, median_interval
from tests.analysis.records import make_failure, make_record, make_timing, metrics_of


def test_a_step_is_as_slow_as_its_slowest_rank():
    assert slowest_rank_ms([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]


def test_step_time_is_the_median_of_slowest_ranks_not_the_slowest_of_medians():
    metrics = metrics_of(make_record(timing=make_timing([[10.0, 10.0, 40.0], [40.0, 10.0, 10.0]])))
    assert metrics.step_time_ms == 40.0


def test_tokens_per_s_divides_the_step_s_tokens_by_the_median_step():
    metrics = metrics_of(make_record(timing=make_timing([[100.0, 200.0, 300.0]] * 2, 1000)))
    assert metrics.tokens_per_s == pytest.approx(5000)
    assert metrics.tokens_per_s_per_rank == pytest.approx(2500)


def test_window_tokens_per_s_counts_all_steps_over_the_slowest_window():
    timing = make_timing([[100.0, 200.0], [100.0, 100.0]], 1000) | {"window_ms": [400.0, 500.0]}
    assert metrics_of(make_record(timing=timing)).window_tokens_per_s == pytest.approx(4000)


@pytest.mark.parametrize(("n", "rank"), [(0, 0), (1, 0), (5, 0), (6, 1), (8, 1), (9, 2), (20, 6)])
def test_an_interval_exists_from_six_samples_on(n, rank):
    assert interval_rank(n) == rank
    assert (median_interval([float(i) for i in range(n)]) is None) == (n < 6)


@pytest.mark.parametrize("n", range(6, 60))
def test_an_interval_covers_95_percent_and_the_next_narrower_one_does_not(n):
    def coverage(k):
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert coverage(interval_rank(n)) >= 0.95 > coverage(interval_rank(n) + 1)


def test_nine_samples_give_the_second_smallest_and_second_largest():
    interval = median_interval([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0])
    assert (interval.low, interval.high) == (2.0, 8.0)


def test_the_slow_end_of_the_steps_is_the_low_end_of_tokens_per_s():
    steps = [[100.0, 110.0, 120.0, 130.0, 140.0, 200.0]]
    metrics = metrics_of(make_record(timing=make_timing(steps, 1000)))
    assert metrics.tokens_per_s_low == pytest.approx(5000)
    assert metrics.tokens_per_s_high == pytest.approx(10000)


def test_peak_memory_is_the_worst_rank_s_and_missing_is_none_not_zero():
    assert worst_rank([3, None, 7]) == 7
    assert worst_rank([None, None]) is None
    assert worst_rank(None) is None


def test_resident_above_base_subtracts_each_rank_s_own_base():
    memory = {"peak_resident_bytes": [500, 600], "base_resident_bytes": [100, 350]}
    assert metrics_of(make_record(memory=memory)).resident_above_base_bytes == 400


def test_share_is_the_worst_rank_s_time_over_that_rank_s_own_step():
    share = communication_share(Trace(step_ms=[100.0, 200.0], total_ms=[40.0, 60.0], exposed_ms=[30.0, 20.0]))
    assert share.total == pytest.approx(0.3)
    assert share.exposed == pytest.approx(0.3)


def test_a_trace_over_1_2_times_the_timed_step_voids_the_share_and_says_so():
    trace = {"step_ms": [121.0, 100.0], "total_ms": [1.0, 1.0], "exposed_ms": [1.0, 1.0]}
    metrics = metrics_of(make_record(trace=trace))
    assert metrics.communication_share is None
    assert metrics.exposed_communication_share is None
    assert "1.21 times" in metrics.note


def test_mfu_is_flops_over_step_time_ranks_and_peak():
    metrics = metrics_of(make_record())
    assert metrics.mfu_causal == pytest.approx(1e12 / (0.1 * 2 * 1e15))
    assert metrics.hfu_causal == pytest.approx(2e12 / (0.1 * 2 * 1e15))
    assert metrics.mfu_full is metrics.hfu_full is None


@pytest.mark.parametrize(
    ("column", "source"),
    [
        ("mfu_causal", "model_flops_causal"),
        ("mfu_full", "model_flops_full"),
        ("hfu_causal", "hardware_flops_causal"),
        ("hfu_full", "hardware_flops_full"),
    ],
)
def test_each_utilisation_comes_of_its_own_flops(column, source):
    metrics = metrics_of(make_record(analytic={source: 10**13}))
    assert getattr(metrics, column) == pytest.approx(1e13 / (0.1 * 2 * 1e15))


@pytest.mark.parametrize("config", [{"hardware": "cpu"}, {"dtype": "fp32"}])
def test_there_is_no_mfu_without_a_peak_for_that_hardware_and_dtype(config):
    assert metrics_of(make_record(config=config)).mfu_causal is None


def test_a_wrong_result_has_no_speed_even_where_it_was_timed():
    metrics = metrics_of(make_record(status="wrong_result", reason="dq is off"))
    assert metrics.tokens_per_s is None
    assert metrics.note == "dq is off"


def test_a_failed_cell_has_nothing_but_its_reason():
    metrics = metrics_of(make_failure("out_of_memory", "no room"))
    assert (metrics.step_time_ms, metrics.peak_allocated_bytes, metrics.note) == (None, None, "no room")


def test_a_short_warm_up_is_noted():
    timing = make_timing([[1.0]] * 2) | {"warmup": "short"}
    assert "shorter steps" in metrics_of(make_record(timing=timing, trace=None)).note
