import pytest

from analysis.read.frame import SETTINGS, config_columns
from analysis.read.hardware import peak_flops_per_s
from tests.support.records import frame_of_records, make_record


def test_config_columns_of_the_frame_and_the_summary(tmp_path, summary_of):
    records = [make_record(), make_record(config={"strategy": "local"})]
    config = [key for key in records[0]["config"] if key != "experiment"]
    expected = [*config, *(key for key in SETTINGS if key not in config)]
    assert config_columns(frame_of_records(tmp_path, records)) == expected
    assert config_columns(summary_of(records)) == expected


def test_prediction_has_no_device_name(tmp_path):
    frame = frame_of_records(tmp_path, [make_record(provenance="predicted")])
    assert frame["device_name"].isna().all()


def test_peak_flops_come_from_the_hardware_files():
    peaks = peak_flops_per_s()
    assert peaks["h100_80gb"] == pytest.approx(989.4e12)
    assert not {"auto", "cpu"} & {*peaks}


def test_frame_has_all_settings_that_the_analysis_reads(tmp_path):
    record = make_record()
    record["config"] = {"seq_len": 8192, "strategy": "ring"}
    for number, records in enumerate(([], [record])):
        assert {*SETTINGS} <= {*frame_of_records(tmp_path / str(number), records).columns}
