"""Sections in every view: an added one, and the order in a terminal."""

import re

import pytest

from analysis.read.views import View
from analysis.report import write_report
from analysis.show import sections
from analysis.show.section import Column, Section, Table
from tests.support.records import make_predicted, make_record, write_sweep


@pytest.fixture
def views_of(tmp_path, capsys):
    """Return a function from records to the text of each view of their report."""

    def views_of(records):
        write_report(write_sweep(tmp_path, records))
        summary, page = ((tmp_path / name).read_text() for name in ("summary.md", "report.html"))
        return {"summary": summary, "page": page, "terminal": capsys.readouterr().out}

    return views_of


@pytest.mark.usefixtures("without_figures")
def test_added_section_appears_in_every_view_as_marked(views_of, monkeypatch):
    def added(findings):
        table = Table.from_items([Column("cells", str)], [f"{len(findings.cells)} of them"])
        return Section("Added", ["a sentence"], table, "how to read it", prints_table=True)

    monkeypatch.setattr(sections, "SECTIONS", (*sections.SECTIONS, added))
    views = views_of([make_record()])
    for text in ("Added", "a sentence", "1 of them", "how to read it"):
        assert all(text in views[name] for name in ("summary", "page"))
    assert "1 of them" in views["terminal"]
    assert "a sentence" not in views["terminal"]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(("record", "is_answer_first"), [(make_record(), False), (make_predicted(), True)])
def test_terminal_answer_is_last_or_first_for_predictions(views_of, record, is_answer_first):
    views = views_of([record])
    answer = re.search(r"## Answer\n\n- (.{20})", views["summary"])[1]
    printed = " ".join(views["terminal"].split())
    assert (printed.index(answer) < printed.index("strategy length")) is is_answer_first


def test_view_has_its_columns_without_empty_ones():
    columns = [
        Column("a", str, views=frozenset(View)),
        Column("b", lambda _: "", views=frozenset(View)),
        Column("c", str, views=frozenset({View.TERMINAL})),
    ]
    table = Table.from_items(columns, ["x"])
    shown = {view: [column.heading for column in table.in_view(view).columns] for view in View}
    assert shown == {view: ["a", "c"] if view is View.TERMINAL else ["a"] for view in View}
