from analysis.cells.selection import MAX_SERIES, for_figures
from bench.strategies import STRATEGIES
from tests.support.records import grid, make_failure, make_record


def test_comparisons_are_drawn_whole(cells_of):
    strategies = [*STRATEGIES.ours][:5]
    records = [
        make_record(config={"strategy": strategy, "model": f"model_{number}"})
        for number in range(6)
        for strategy in strategies
    ]
    selection = for_figures(cells_of(records))
    drawn = selection.cells.frame
    assert drawn.groupby("model")["strategy"].nunique().tolist() == [len(strategies)] * 2
    counts = "local 4, ring 4, ulysses 4, ulysses_chunked 4, usp 4"
    assert selection.note.startswith("10 of 30 series are drawn, of comparisons in")
    assert f" Left out: {counts}; all cells are in" in selection.note


def test_a_comparison_without_a_result_is_drawn_after_one_with_results(cells_of):
    failed = [make_failure("out_of_memory", "no", config={"model": f"a{i}"}) for i in range(MAX_SERIES)]
    working = grid(["ulysses", "ring"], [8192])
    drawn = for_figures(cells_of([*failed, *working])).cells.frame
    assert set(drawn["strategy"][drawn["tokens_per_s"].notna()]) == {"ulysses", "ring"}


def test_one_comparison_with_too_many_series_keeps_some_of_every_strategy(cells_of):
    records = [
        make_record(config={"strategy": strategy, "cluster.world_size": ranks, "layout": layout})
        for strategy in ("ulysses", "ring")
        for ranks in range(2, 18)
        for layout in ("zigzag", "striped")
    ]
    selection = for_figures(cells_of(records))
    shown = selection.cells.frame.groupby("strategy")
    assert shown.size().to_dict() == {"ulysses": 6, "ring": 6}
    assert shown["cluster.world_size"].nunique().to_dict() == {"ulysses": 6, "ring": 6}
    assert "12 of 64 series" in selection.note
