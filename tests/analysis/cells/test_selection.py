from analysis.cells.selection import MAX_SERIES, select_for_figures
from tests.support.records import grid, make_failure, make_record


def test_figures_draw_the_series_with_most_results(cells_of):
    failed = [make_failure("out_of_memory", "no", config={"model": f"a{i}"}) for i in range(MAX_SERIES)]
    working = grid(["ulysses", "ring"], [8192])
    selection = select_for_figures(cells_of([*failed, *working]))
    drawn = selection.cells.frame
    assert set(drawn["strategy"][drawn["tokens_per_s"].notna()]) == {"ulysses", "ring"}
    assert selection.cells.series_number.nunique() == MAX_SERIES
    assert "24 of 26 series with the most results" in selection.note


def test_figures_draw_all_series_up_to_the_maximum(cells_of):
    records = [make_record(config={"model": f"a{number}"}) for number in range(MAX_SERIES)]
    selection = select_for_figures(cells_of(records))
    assert (len(selection.cells), selection.note) == (MAX_SERIES, None)
