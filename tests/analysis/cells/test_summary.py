import pandas as pd
import pytest

from analysis.cells.summary import INTERVALS, summarise
from analysis.read.frame import NUMBER_COLUMNS
from analysis.read.metrics import Reduction, metrics_reduced
from tests.support.records import frame_of_records, make_failure, make_record, make_timing

UTILISATIONS = {
    "mfu_causal": "model_flops_causal",
    "mfu_full": "model_flops_full",
    "hfu_causal": "hardware_flops_causal",
    "hfu_full": "hardware_flops_full",
}


def repeats(step_times_ms, **overrides):
    return [
        make_record(repeat=number, timing=make_timing([[ms] * 8] * 2, 1000), **overrides)
        for number, ms in enumerate(step_times_ms)
    ]


def test_started_at_is_of_the_last_repeat(summary_of):
    started = [make_record(repeat=number, started_at=at) for number, at in enumerate("bca")]
    other = make_record(config={"seq_len": 2**20}, started_at="z")
    assert summary_of([other, *started])["started_at"].tolist() == ["c", "z"]


def test_cell_that_ran_once_is_unchanged_by_repeated_cells(summary_of):
    once, several = repeats([100.0]), repeats([100.0, 200.0], config={"seq_len": 2**20}, cell_id="several")
    alone, together = (summary_of(records).select_dtypes("number") for records in (once, [*several, *once]))
    pd.testing.assert_frame_equal(together[:1][alone.columns], alone)


@pytest.mark.parametrize(
    ("reduction", "reduced"),
    {
        Reduction.MEDIAN: 2.0,
        Reduction.RATE: 2.0,
        Reduction.LOWEST: 1.0,
        Reduction.HIGHEST: 4.0,
        Reduction.TOTAL: 7.0,
        Reduction.FIRST: 4.0,
        Reduction.FIRST_OF_ALL: 4.0,
    }.items(),
    ids=str,
)
def test_metrics_are_reduced_over_repeats(tmp_path, reduction, reduced):
    frame = frame_of_records(tmp_path, repeats([100.0] * 3))
    columns = [name for name in metrics_reduced(reduction) if name in NUMBER_COLUMNS and name != "n_steps"]
    known, unknown = (
        summarise(frame.assign(**dict.fromkeys(columns, pd.Series(values, dtype="float64")))).rows[columns]
        for values in ([4.0, 1.0, 2.0], [None] * 3)
    )
    assert known.iloc[0].drop(INTERVALS, errors="ignore").eq(reduced).all()
    assert unknown.isna().all(axis=None)


def test_rate_of_one_run_equals_that_of_two_equal_runs(summary_of):
    once, twice = (summary_of(repeats([7.7] * count))["tokens_per_s"][0] for count in (1, 2))
    assert once == twice


def test_rates_over_repeats_are_total_work_over_total_time(summary_of):
    (row,) = summary_of(repeats([100.0, 300.0], analytic=dict.fromkeys(UTILISATIONS.values(), 10**13))).iloc
    assert row["tokens_per_s"] == pytest.approx(1000 / 0.2)
    assert [*row[[*UTILISATIONS]]] == pytest.approx([1e13 / (0.2 * 2 * 1e15)] * 4)


def test_interval_needs_six_repeats(summary_of):
    five, six = (summary_of(repeats([*range(1, count)])).iloc[0] for count in (6, 7))
    assert (five["n"], five["n_of"], five["tokens_per_s_lowest_repeat"]) == (5, "repeats", 1000 / 5e-3)
    assert five[["tokens_per_s_low", "step_time_low_ms"]].isna().all()
    assert (six["step_time_low_ms"], six["step_time_high_ms"]) == (1.0, 6.0)
    assert six["tokens_per_s_low"] == pytest.approx(1000 / 6e-3)


def test_failed_repeat_sets_the_status_of_its_cell(summary_of):
    row = summary_of([*repeats([100.0, 100.0]), make_failure("out_of_memory", "no room", repeat=2)]).iloc[0]
    assert (row["status"], row["failed_repeats"], row["repeats"]) == ("out_of_memory", 1, 3)
    assert row["tokens_per_s"] == pytest.approx(10000)


def test_same_cell_on_two_machines_is_two_rows(summary_of):
    one, other = ({"device_name": "one"}, {"device_name": "other"})
    assert len(summary_of([make_record(environment=environment) for environment in (one, other)])) == 2
    assert len(summary_of([make_record(environment={}, repeat=repeat) for repeat in (0, 1)])) == 1


def test_rows_are_sorted_by_length_and_strategy(summary_of):
    asked = [("ulysses", 65536), ("ulysses", 8192), ("local", 65536)]
    records = [make_record(config={"strategy": strategy, "seq_len": length}) for strategy, length in asked]
    summary = summary_of(records)
    found = list(zip(summary["strategy"], summary["seq_len"], strict=True))
    assert found == [("ulysses", 8192), ("local", 65536), ("ulysses", 65536)]
