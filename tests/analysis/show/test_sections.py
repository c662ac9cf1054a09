"""Sections in every view: an added one, the probe, and the order in a terminal."""

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
def test_probed_cell_has_a_row_in_every_view(views_of):
    views = views_of([make_record(config={"experiment": "probe"}, experiment="probe", probe=PROBE)])
    for text in views.values():
        shown = re.findall(r"[\d,]+ of [\d,]+", re.sub(r"<[^>]+>", " ", text[text.index("other outputs") :]))
        assert shown[:3] == ["1 of 1,200", "2 of 1,200", "0 of 300"]


@pytest.mark.usefixtures("without_figures")
def test_probe_shows_a_loss_error_that_is_not_finite(views_of):
    probe = PROBE | {"loss_error": None}
    views = views_of([make_record(config={"experiment": "probe"}, experiment="probe", probe=probe)])
    assert "not finite" in views["summary"]


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
