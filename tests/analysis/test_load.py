import pytest

from analysis.load import config_columns, peak_flops_per_s, read_sweeps, to_frame
from bench.environment import REPOSITORY
from bench.store import StoreError
from tests.analysis.records import make_failure, make_record, write_sweep

REFERENCE = REPOSITORY / "results" / "reference" / "cpu"


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


def test_of_a_cell_that_was_run_again_only_the_last_attempt_counts(tmp_path):
    folder = write_sweep(tmp_path, [make_failure("interrupted", "stopped"), make_record()])
    assert [record["status"] for record in read_sweeps([folder])] == ["ok"]


def test_records_of_the_version_before_are_read_and_lack_what_came_later(tmp_path):
    old = make_record() | {"schema_version": 2}
    frame = to_frame(read_sweeps([write_sweep(tmp_path, [old])]), {})
    assert frame["peak_allocated_bytes"].tolist() == [2 * 1024**3]
    assert frame["whole_life_allocated_bytes"].isna().all()


def test_the_records_that_ship_with_the_project_are_read():
    assert len(read_sweeps([REFERENCE])) > 0


def test_two_folders_keep_their_records_apart(tmp_path):
    folders = [write_sweep(tmp_path / name, [make_record()]) for name in "ab"]
    assert len(read_sweeps(folders)) == 2


@pytest.mark.parametrize("lacking", ["cell_id", "config", "provenance"])
def test_a_line_that_lacks_a_part_is_named_by_its_number(tmp_path, lacking):
    broken = make_record()
    del broken[lacking]
    folder = write_sweep(tmp_path, [make_record(config={"seq_len": 1024}), broken])
    with pytest.raises(StoreError, match=rf"records.jsonl:2: .*{lacking}"):
        read_sweeps([folder])


def test_a_list_in_a_config_does_not_break_the_comparison_of_cells(summary_of):
    assert len(summary_of([make_record(config={"data.files": ["a", "b"]}), make_record()])) == 2


def test_a_prediction_does_not_take_the_machine_that_computed_it():
    frame = to_frame([make_record(provenance="predicted")], {})
    assert frame["device_name"].isna().all()


def test_peaks_come_from_the_hardware_files():
    peaks = peak_flops_per_s()
    assert peaks["h100_80gb"] == pytest.approx(989.4e12)
    assert "auto" not in peaks
