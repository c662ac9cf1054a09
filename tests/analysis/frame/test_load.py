import pytest

from analysis.frame.load import config_columns, peak_flops_per_s, to_frame
from tests.analysis.records import make_failure, make_record


def test_a_frame_has_one_row_per_record_with_missing_as_missing():
    frame = to_frame([make_record(), make_failure("out_of_memory", "no room")], {})
    assert len(frame) == 2
    assert frame["step_time_ms"].isna().tolist() == [False, True]
    assert frame["peak_allocated_bytes"].isna().tolist() == [False, True]
    assert frame["peak_reserved_bytes"].isna().all()


def test_config_columns_are_the_configuration_before_and_after_summarising(summary_of):
    records = [make_record(), make_record(config={"strategy": "local"})]
    expected = [key for key in records[0]["config"] if key != "experiment"]
    assert config_columns(to_frame(records, {})) == expected
    assert config_columns(summary_of(records)) == expected


def test_a_list_in_a_config_does_not_break_the_comparison_of_cells(summary_of):
    assert len(summary_of([make_record(config={"data.files": ["a", "b"]}), make_record()])) == 2


def test_a_prediction_does_not_take_the_machine_that_computed_it():
    frame = to_frame([make_record(provenance="predicted")], {})
    assert frame["device_name"].isna().all()


def test_peaks_come_from_the_hardware_files():
    peaks = peak_flops_per_s()
    assert peaks["h100_80gb"] == pytest.approx(989.4e12)
    assert "auto" not in peaks
