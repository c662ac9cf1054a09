import json

import pandas as pd
import pytest

from analysis.frame import archive
from analysis.frame.archive import read_archive
from analysis.frame.load import METRIC_COLUMNS, NUMBER_COLUMNS
from bench.environment import REPOSITORY
from bench.store import StoreError
from tests.analysis.records import STEPS_HELD, make_failure, make_record, write_sweep
from tests.analysis.synthetic import synthetic_records

REFERENCE = REPOSITORY / "results" / "reference" / "cpu"


@pytest.fixture
def in_batches(monkeypatch):
    """Batches of a few lines."""
    monkeypatch.setattr(archive, "BATCH_RECORDS", 7)


def test_batches_are_the_records_in_their_order(tmp_path, in_batches, monkeypatch):
    records = synthetic_records(100)
    folder = write_sweep(tmp_path, records)
    archived = read_archive([folder], {})
    monkeypatch.setattr(archive, "BATCH_RECORDS", 128)
    pd.testing.assert_frame_equal(archived.frame, read_archive([folder], {}).frame)
    assert [archived.record(row) for row in range(100)] == records


@pytest.mark.parametrize(
    ("first", "later"),
    [(1, 2), (1, "auto"), (1, None), (1, 0.5), (1, 2**63), (True, "auto"), (True, 2), ([], 1)],
)
def test_a_setting_is_what_it_is_whatever_another_sweep_has_in_its_place(tmp_path, first, later):
    sweeps = [[make_record(config={"measure.steps": value})] * 2 for value in (first, later)]
    folders = [write_sweep(tmp_path / str(number), records) for number, records in enumerate(sweeps)]
    told = [json.dumps(value) if value == [] else value for value in (first, later)]
    found = read_archive(folders, {}).frame["measure.steps"]
    pd.testing.assert_series_equal(found, pd.Series(told, name="measure.steps"))


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize(("first", "later"), [(1, True), (0, False), (0.0, -0.0), (1, 1)])
def test_settings_that_are_equal_are_written_as_they_were(tmp_path, first, later, sweeps):
    records = [
        make_record(cell_id=name, config={"measure.steps": value})
        for name, value in (("a", first), ("b", later))
    ]
    folders = [write_sweep(tmp_path / str(number), records[number::sweeps]) for number in range(sweeps)]
    found = read_archive(folders, {}).frame["measure.steps"]
    assert [*map(repr, found.tolist())] == [repr(first), repr(later)]


def test_what_only_some_sweeps_measured_is_missing_of_the_others(tmp_path):
    timed, failed = make_record(), make_failure("out_of_memory", "out of memory")
    folders = [write_sweep(tmp_path / name, [record]) for name, record in (("a", timed), ("b", failed))]
    frame = read_archive(folders, {}).frame
    assert frame["step_time_ms"].notna().tolist() == [True, False]
    assert frame["warmup"].notna().tolist() == [True, False]
    assert frame["note"].tolist()[1] == "out of memory"
    assert {frame[column].dtype.kind for column in NUMBER_COLUMNS} == {"f"}
    assert [column for column in frame if column in METRIC_COLUMNS] == [*METRIC_COLUMNS]


def test_a_setting_that_is_a_list_in_every_record_is_one_comparable_value(tmp_path):
    records = [make_record(config={"data.files": ["a", "b"], "seed": seed}) for seed in range(3)]
    frame = read_archive([write_sweep(tmp_path, records)], {}).frame
    assert frame["data.files"].tolist() == ['["a", "b"]'] * 3


@pytest.mark.parametrize("lacking", ["cell_id", "config", "provenance"])
def test_a_line_that_lacks_a_part_is_named_by_its_number(tmp_path, in_batches, lacking):
    records = synthetic_records(60)
    del records[44][lacking]
    with pytest.raises(StoreError, match=rf"records.jsonl:45: .*{lacking}"):
        read_archive([write_sweep(tmp_path, records)], {})


def test_a_line_that_only_a_reader_of_all_of_it_refuses_is_named_by_its_number(tmp_path, in_batches):
    folder = write_sweep(tmp_path, synthetic_records(60))
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    lines[44] = b'{"extra": "\xff", ' + lines[44][1:]
    (folder / "records.jsonl").write_bytes(b"".join(lines))
    archived = read_archive([folder], {})
    with pytest.raises(StoreError, match=r"records.jsonl:45: "):
        archived.record(44)


def test_of_a_cell_that_was_run_again_only_the_last_attempt_counts(tmp_path):
    folder = write_sweep(tmp_path, [make_failure("interrupted", "stopped"), make_record()])
    archived = read_archive([folder], {})
    assert archived.frame["status"].tolist() == ["ok"]
    assert archived.record(0)["status"] == "ok"


def held_of(folders):
    """Per record, by its strategy, how many of its steps are held."""
    frame = read_archive(folders, {}).frame
    return [*zip(frame["strategy"], frame["steps_held"], strict=True)]


def with_steps(strategy, steps, held, against=None):
    check = STEPS_HELD | {"steps": held, "of_steps": steps}
    losses = {"loss": [5.0] * steps, "held_against": against}
    return make_record(config={"strategy": strategy}, checks=[check], losses=losses)


def test_what_others_were_held_against_is_held_by_them_and_by_none_of_another_sweep(tmp_path):
    first = with_steps("local", steps=5, held=0)
    others = [
        with_steps("ring", steps=4, held=4, against=first["cell_id"]),
        with_steps("usp", steps=9, held=3, against=first["cell_id"]),
        with_steps("ulysses", steps=6, held=0),
    ]
    together = write_sweep(tmp_path / "together", [first, *others])
    alone = write_sweep(tmp_path / "alone", [first])
    held = [("local", 4), ("ring", 4), ("usp", 3), ("ulysses", 0)]
    assert held_of([together, alone]) == [*held, ("local", 0)]
    longer = write_sweep(tmp_path / "longer", [first, others[0] | {"checks": [STEPS_HELD | {"steps": 8}]}])
    assert held_of([longer]) == [("local", 5), ("ring", 8)]


def test_two_folders_keep_their_records_apart(tmp_path):
    folders = [write_sweep(tmp_path / name, [make_record()]) for name in "ab"]
    assert len(read_archive(folders, {}).frame) == 2


def test_settings_are_shared_only_if_no_record_of_any_folder_differs(tmp_path):
    one = write_sweep(tmp_path / "a", [make_record(), make_record(config={"batch": 2})])
    two = write_sweep(tmp_path / "b", [make_record(config={"dtype": "fp32"})])
    shared = read_archive([one, two], {}).shared
    assert shared["engine"] == "zero3"
    assert not {"batch", "dtype"} & shared.keys()


def test_environments_are_kept_once_whatever_the_load_was(tmp_path):
    seen = [("one", 0.1), ("one", 0.2), ("two", 0.1), ("one", 0.3)]
    records = [
        make_record(
            environment={"device_name": name, "load_average": load, "gpu_temperature_c": [int(100 * load)]},
            repeat=repeat,
        )
        for repeat, (name, load) in enumerate(seen)
    ]
    archived = read_archive([write_sweep(tmp_path, records)], {})
    assert archived.environments == [{"device_name": "one"}, {"device_name": "two"}]


def test_records_of_the_version_before_are_read_and_lack_what_came_later(tmp_path):
    old = make_record() | {"schema_version": 2}
    frame = read_archive([write_sweep(tmp_path, [old])], {}).frame
    assert frame["peak_allocated_bytes"].tolist() == [2 * 1024**3]
    assert frame["whole_life_allocated_bytes"].isna().all()


def test_the_records_that_ship_with_the_project_are_read():
    assert len(read_archive([REFERENCE], {}).frame) > 0
