"""A section is one function and one line, and stands in every view; so does what an experiment asks."""

import re

import pytest

from analysis.read.views import View
from analysis.report import write_report
from analysis.show import sections
from analysis.show.section import Column, Section, Table
from tests.support.records import make_predicted, make_record, write_sweep

MOVED = {
    "other_outputs": 1, "other_gradients": 2, "other_positions": 1200, "earlier_outputs": 0,
    "earlier_positions": 300, "own_outputs": 290, "own_positions": 310,
}  # fmt: skip
PROBE = {
    "tokens": 64, "documents": 4, "changes": 10, "moved": {"model": MOVED}, "noise": 0.0,
    "loss_error": 1.2e-7, "loss_position": 4, "loss_limit": 1e-6,
}  # fmt: skip


@pytest.fixture
def views_of(tmp_path, capsys):
    """Records to the text of each view of their report."""

    def views_of(records):
        write_report(write_sweep(tmp_path, records))
        summary, page = ((tmp_path / name).read_text() for name in ("summary.md", "report.html"))
        return {"summary": summary, "page": page, "terminal": capsys.readouterr().out}

    return views_of


@pytest.mark.usefixtures("without_figures")
def test_a_section_is_one_line_and_stands_in_every_view_and_in_a_terminal_as_marked(views_of, monkeypatch):
    def added(findings):
        table = Table.of([Column("cells", str)], [f"{len(findings.cells)} of them"])
        return Section("Added", ["a sentence"], table, "how to read it", prints_table=True)

    monkeypatch.setattr(sections, "SECTIONS", (*sections.SECTIONS, added))
    views = views_of([make_record()])
    for text in ("Added", "a sentence", "1 of them", "how to read it"):
        assert all(text in views[name] for name in ("summary", "page"))
    assert "1 of them" in views["terminal"]
    assert "a sentence" not in views["terminal"]


@pytest.mark.usefixtures("without_figures")
def test_a_probed_cell_has_its_row_in_every_view(views_of):
    views = views_of([make_record(config={"experiment": "probe"}, experiment="probe", probe=PROBE)])
    for text in views.values():
        shown = re.findall(r"[\d,]+ of [\d,]+", re.sub(r"<[^>]+>", " ", text[text.index("other outputs") :]))
        assert shown[:3] == ["1 of 1,200", "2 of 1,200", "0 of 300"]


@pytest.mark.usefixtures("without_figures")
def test_a_loss_error_of_a_probe_that_is_no_number_is_shown_as_such(views_of):
    probe = PROBE | {"loss_error": None}
    views = views_of([make_record(config={"experiment": "probe"}, experiment="probe", probe=probe)])
    assert "not finite" in views["summary"]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("record", "order"),
    [(make_record(), ["strategy ", "Confidence"]), (make_predicted(), ["Confidence", "strategy "])],
)
def test_a_terminal_ends_with_the_answer_of_what_ran_and_begins_with_that_of_predictions(
    views_of, record, order
):
    printed = views_of([record])["terminal"]
    assert sorted(order, key=printed.index) == order


def test_columns_without_a_text_are_left_out_and_others_stand_where_they_say():
    columns = [
        Column("a", str, views=frozenset(View)),
        Column("b", lambda _: "", views=frozenset(View)),
        Column("c", str, views=frozenset({View.TERMINAL})),
    ]
    table = Table.of(columns, ["x"])
    shown = {view: [column.heading for column in table.in_view(view).columns] for view in View}
    assert shown == {view: ["a", "c"] if view is View.TERMINAL else ["a"] for view in View}
