import csv
import io

import pytest

from analysis.tables.csv_text import FORMULA_STARTS, csv_text
from tests.analysis.records import make_failure, make_record


def cells(summary):
    return list(csv.DictReader(io.StringIO(csv_text(summary), newline="")))


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_no_text_cell_is_a_formula(summary_of, start):
    innocent = make_failure("error", "before it", config={"seq_len": 1024})
    rows = cells(summary_of([innocent, make_failure("error", f"{start}1+1")]))
    assert [row["reason"] for row in rows] == ["before it", f"'{start}1+1"]


@pytest.mark.parametrize("text", ["a, b", 'say "no"', "one\ntwo", "one\r\ntwo", "one\rtwo", "plain"])
def test_a_text_is_read_back_as_it_was_with_one_kind_of_line_end(summary_of, text):
    found = cells(summary_of([make_failure("error", text)]))[0]["reason"]
    assert found == "\n".join(text.splitlines())


@pytest.mark.parametrize(("value", "written"), [(True, "True"), (None, ""), (-1, "-1"), (["=1"], '["=1"]')])
def test_a_setting_of_any_kind_is_one_cell(summary_of, value, written):
    records = [make_record(config={"data.files": each, "seed": n}) for n, each in enumerate([value, "text"])]
    assert [row["data.files"] for row in cells(summary_of(records))] == [written, "text"]


@pytest.mark.parametrize("values", [[True, 1], [True, 1, "auto"]])
def test_what_is_equal_but_not_the_same_stays_apart(summary_of, values):
    records = [make_record(config={"measure.steps": each, "seed": n}) for n, each in enumerate(values)]
    assert [row["measure.steps"] for row in cells(summary_of(records))] == [*map(str, values)]


def test_a_number_stays_a_number(summary_of):
    row = cells(summary_of([make_record(losses={"loss": [-1.5, -2.5]})]))[0]
    assert row["last_loss"] == "-2.5"
    assert row["peak_allocated_bytes"] == str(2 * 1024**3)


def test_missing_is_an_empty_cell(summary_of):
    row = cells(summary_of([make_failure("error", "gone")]))[0]
    assert row["step_time_ms"] == row["peak_allocated_bytes"] == row["speed_up"] == ""
