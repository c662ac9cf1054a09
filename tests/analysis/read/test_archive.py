import json

import pandas as pd
import pytest
from msgspec import convert

from analysis.read.archive import read_archive
from analysis.read.frame import METRIC_COLUMNS, NUMBER_COLUMNS
from bench.common.environment import Environment
from tests.support.records import (
    ENVIRONMENT,
    TRAINING_COMPARED,
    as_record,
    make_failure,
    make_record,
    write_sweep,
)


@pytest.mark.parametrize(
    ("first", "later"),
    [(1, "auto"), (1, None), (1, 0.5), (1, 2**63), (True, 2), (1, True), (0.0, -0.0), (["a", "b"], 1)],
)
def test_settings_keep_their_type_next_to_another_sweep(tmp_path, first, later):
    sweeps = [[make_record(config={"measure.steps": value})] * 2 for value in (first, later)]
    folders = [write_sweep(tmp_path / str(number), records) for number, records in enumerate(sweeps)]
    values = [json.dumps(value) if isinstance(value, list) else value for value in (first, later)]
    found = read_archive(folders, {}).frame["measure.steps"]
    pd.testing.assert_series_equal(found, pd.Series(values, name="measure.steps"))
    assert [*map(repr, found.tolist())] == [*map(repr, pd.Series(values).tolist())]


def test_metrics_that_a_sweep_did_not_measure_are_missing(tmp_path):
    timed, failed = make_record(), make_failure("out_of_memory", "out of memory")
    folders = [write_sweep(tmp_path / name, [record]) for name, record in (("a", timed), ("b", failed))]
    archive = read_archive(folders, {})
    assert [archive.record(row) for row in range(2)] == [as_record(timed), as_record(failed)]
    frame = archive.frame
    assert frame["step_time_ms"].notna().tolist() == [True, False]
    assert frame["warmup"].notna().tolist() == [True, False]
    assert frame["note"].tolist()[1] == "out of memory"
    assert {frame[column].dtype.kind for column in NUMBER_COLUMNS} == {"f"}
    assert [column for column in frame if column in METRIC_COLUMNS] == [*METRIC_COLUMNS]


def compared_steps_of(folders):
    """Return the strategy and the number of compared steps of each record."""
    frame = read_archive(folders, {}).frame
    return [*zip(frame["strategy"], frame["steps_compared"], strict=True)]


def with_steps(strategy, steps, compared, against=None):
    check = TRAINING_COMPARED | {"steps": compared, "of_steps": steps}
    losses = {"loss": [5.0] * steps, "compared_with": against}
    return make_record(config={"strategy": strategy}, checks=[check], losses=losses)


def test_compared_steps_count_for_both_cells_of_one_sweep(tmp_path):
    first = with_steps("local", steps=5, compared=0)
    others = [
        with_steps("ring", steps=4, compared=4, against=first["cell_id"]),
        with_steps("usp", steps=9, compared=3, against=first["cell_id"]),
        with_steps("ulysses", steps=6, compared=0),
    ]
    together = write_sweep(tmp_path / "together", [first, *others])
    alone = write_sweep(tmp_path / "alone", [first])
    compared = [("local", 4), ("ring", 4), ("usp", 3), ("ulysses", 0)]
    assert compared_steps_of([together, alone]) == [*compared, ("local", 0)]
    longer = write_sweep(
        tmp_path / "longer", [first, others[0] | {"checks": [TRAINING_COMPARED | {"steps": 8}]}]
    )
    assert compared_steps_of([longer]) == [("local", 5), ("ring", 8)]


def test_shared_settings_are_equal_in_all_folders(tmp_path):
    one = write_sweep(tmp_path / "a", [make_record(), make_record(config={"batch": 2})])
    two = write_sweep(tmp_path / "b", [make_record(config={"dtype": "fp32"})])
    shared = read_archive([one, two], {}).shared_settings
    assert shared["engine"] == "zero3"
    assert not {"batch", "dtype"} & shared.keys()


def test_environments_that_differ_only_in_load_count_once(tmp_path):
    loads = [("one", 0.1), ("one", 0.2), ("two", 0.1), ("one", 0.3)]
    records = [
        make_record(environment={"device_name": name, "load_average": load}, repeat=repeat)
        for repeat, (name, load) in enumerate(loads)
    ]
    archived = read_archive([write_sweep(tmp_path, records)], {})
    assert archived.environments == [
        convert(ENVIRONMENT | {"device_name": name}, Environment) for name in ("one", "two")
    ]
