import pytest

from analysis.read.notes import load_note, step_notes
from tests.support.records import as_record, make_record


@pytest.mark.parametrize(
    ("steps_ms", "said"),
    [
        ([100.0] * 20, []),
        ([100, 101, 102, 103, 104, 105], []),
        ([100, 105, 110, 115, 120, 125], ["unstable: "]),
        ([100, 130, 160, 190, 220, 250], ["very unstable: "]),
        ([100, 101, 102, 103, 104, 200], ["1 of 6 steps are severe outliers, kept"]),
        ([100, 200, 300, 400, 500], []),
    ],
)
def test_step_notes_on_unstable_steps_and_outliers(steps_ms, said):
    notes = step_notes(steps_ms)
    assert [note.startswith(start) for note, start in zip(notes, said, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(("load", "busy"), [(2.0, False), (4.0, False), (4.1, True)])
def test_load_note_above_twice_the_cores(load, busy):
    record = make_record(telemetry={"load_average": load}, environment={"cores": 2})
    assert (load_note(as_record(record)) is not None) == busy
