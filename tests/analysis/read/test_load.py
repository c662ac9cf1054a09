import pytest

from analysis.read.frame import SETTINGS, config_columns
from analysis.read.hardware import peak_flops_per_s
from tests.support.records import frame_of_records, make_record


def test_config_columns_are_the_configuration_before_and_after_summarising(tmp_path, summary_of):
    records = [make_record(), make_record(config={"strategy": "local"})]
    config = [key for key in records[0]["config"] if key != "experiment"]
    expected = [*config, *(key for key in SETTINGS if key not in config)]
    assert config_columns(frame_of_records(tmp_path, records)) == expected
    assert config_columns(summary_of(records)) == expected


def test_a_prediction_does_not_take_the_machine_that_computed_it(tmp_path):
    frame = frame_of_records(tmp_path, [make_record(provenance="predicted")])
    assert frame["device_name"].isna().all()


def test_peaks_come_from_the_hardware_files():
    peaks = peak_flops_per_s()
    assert peaks["h100_80gb"] == pytest.approx(989.4e12)
    assert not {"auto", "cpu"} & {*peaks}


def test_a_setting_that_is_read_is_a_column_also_where_no_record_has_it(tmp_path):
    record = make_record()
    record["config"] = {"seq_len": 8192, "strategy": "ring"}
    for number, records in enumerate(([], [record])):
        assert {*SETTINGS} <= {*frame_of_records(tmp_path / str(number), records).columns}
