import csv
import io

import pytest

from analysis.cells.summary import FORMULA_STARTS, csv_text
from tests.support.records import make_failure, make_record


def cells(summary):
    return list(csv.DictReader(io.StringIO(csv_text(summary), newline="")))


def test_csv_text_has_no_formula(summary_of):
    starts = ("before it", *FORMULA_STARTS)
    failures = [make_failure("error", f"{start}1+1", config={"seed": n}) for n, start in enumerate(starts)]
    found = [row["reason"] for row in cells(summary_of(failures))]
    assert found == ["before it1+1", *(f"'{start}1+1" for start in FORMULA_STARTS)]


@pytest.mark.parametrize("text", ['say "no", twice', "one\r\ntwo", "one\rtwo"])
def test_csv_text_round_trips_with_one_kind_of_line_end(summary_of, text):
    found = cells(summary_of([make_failure("error", text)]))[0]["reason"]
    assert found == "\n".join(text.splitlines())


@pytest.mark.parametrize(("value", "written"), [(True, "True"), (None, ""), (-1, "-1"), (["=1"], '["=1"]')])
def test_csv_setting_of_any_type_is_one_cell(summary_of, value, written):
    records = [make_record(config={"data.files": each, "seed": n}) for n, each in enumerate([value, "text"])]
    assert [row["data.files"] for row in cells(summary_of(records))] == [written, "text"]


def test_csv_numbers_and_missing_values(summary_of):
    row = cells(summary_of([make_record(losses={"loss": [-1.5, -2.5]})]))[0]
    assert (row["last_loss"], row["peak_allocated_bytes"], row["speed_up"]) == ("-2.5", str(2 * 1024**3), "")
