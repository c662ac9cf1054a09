import pandas as pd
import pytest

from analysis.cells.summary import INTERVALS, summarise
from analysis.frame.load import NUMBER_COLUMNS
from analysis.metrics.definitions import Reduction, columns_reduced
from tests.analysis.records import frame_of_records, make_failure, make_record, make_timing

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


def test_repeats_of_a_cell_become_one_row_with_their_median(summary_of):
    summary = summary_of(repeats([100.0, 400.0, 200.0]))
    assert len(summary) == 1
    assert summary["step_time_ms"][0] == 200.0
    assert summary["tokens_per_s"][0] == pytest.approx(5000)


@pytest.mark.parametrize(("starts", "last"), [(["b", "c", "a"], "c"), (["a", None, None], "a")])
def test_a_cell_was_started_when_its_last_repeat_was(summary_of, starts, last):
    started = [make_record(repeat=number, started_at=at) for number, at in enumerate(starts)]
    beside = make_record(config={"seq_len": 2**20}, started_at="z")
    assert summary_of([beside, *started])["started_at"].tolist() == [last, "z"]


def test_a_cell_that_ran_once_is_the_same_beside_one_that_ran_several_times(summary_of):
    once, several = repeats([100.0]), repeats([100.0, 200.0], config={"seq_len": 2**20}, cell_id="several")
    alone, beside = (summary_of(records).select_dtypes("number") for records in (once, [*several, *once]))
    pd.testing.assert_frame_equal(beside[:1][alone.columns], alone)


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
def test_every_metric_is_reduced_over_repeats_as_it_says(tmp_path, reduction, reduced):
    frame = frame_of_records(tmp_path, repeats([100.0] * 3))
    columns = [each for each in columns_reduced(reduction) if each in NUMBER_COLUMNS and each != "n_steps"]
    known, unknown = (
        summarise(frame.assign(**dict.fromkeys(columns, pd.Series(values, dtype="float64")))).rows[columns]
        for values in ([4.0, 1.0, 2.0], [None] * 3)
    )
    assert known.iloc[0].drop(INTERVALS, errors="ignore").eq(reduced).all()
    assert unknown.isna().all(axis=None)


def test_a_rate_over_two_repeats_is_total_work_over_total_time(summary_of):
    assert summary_of(repeats([100.0, 300.0]))["tokens_per_s"][0] == pytest.approx(1000 / 0.2)


def test_a_rate_of_one_run_is_to_the_last_digit_that_of_two_equal_ones(summary_of):
    once, twice = (summary_of(repeats([7.7] * count))["tokens_per_s"][0] for count in (1, 2))
    assert once == twice


@pytest.mark.parametrize("column", sorted(UTILISATIONS))
def test_a_utilisation_over_two_repeats_is_total_work_over_total_time(summary_of, column):
    records = repeats([100.0, 300.0], analytic={UTILISATIONS[column]: 10**13})
    assert summary_of(records)[column][0] == pytest.approx(1e13 / (0.2 * 2 * 1e15))


def test_five_repeats_have_no_interval_although_each_has_eight_steps(summary_of):
    row = summary_of(repeats([1.0, 2.0, 3.0, 4.0, 5.0])).iloc[0]
    assert (row["n"], row["n_of"]) == (5, "repeats")
    assert row[["tokens_per_s_low", "step_time_low_ms"]].isna().all()
    assert row["tokens_per_s_lowest_repeat"] == pytest.approx(1000 / 5e-3)


def test_six_repeats_have_one(summary_of):
    row = summary_of(repeats([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).iloc[0]
    assert (row["step_time_low_ms"], row["step_time_high_ms"]) == (1.0, 6.0)
    assert row["tokens_per_s_low"] == pytest.approx(1000 / 6e-3)


def test_one_failed_repeat_shows_although_the_others_worked(summary_of):
    row = summary_of([*repeats([100.0, 100.0]), make_failure("out_of_memory", "no room", repeat=2)]).iloc[0]
    assert (row["status"], row["failed_repeats"], row["repeats"]) == ("out_of_memory", 1, 3)
    assert row["tokens_per_s"] == pytest.approx(10000)


def test_the_same_cell_on_two_machines_is_two_rows(summary_of):
    assert len(summary_of([make_record(), make_record(environment={"device_name": "other"})])) == 2


def test_a_missing_device_name_does_not_drop_a_cell(summary_of):
    assert len(summary_of([make_record(environment={}), make_record(environment={}, repeat=1)])) == 1


def test_rows_go_by_length_and_then_strategy(summary_of):
    asked = [("ulysses", 65536), ("ulysses", 8192), ("local", 65536)]
    records = [make_record(config={"strategy": strategy, "seq_len": length}) for strategy, length in asked]
    summary = summary_of(records)
    found = list(zip(summary["strategy"], summary["seq_len"], strict=True))
    assert found == [("ulysses", 8192), ("local", 65536), ("ulysses", 65536)]
