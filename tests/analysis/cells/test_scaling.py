import pytest

from analysis.cells.scaling import EFFICIENCY, MAX_LINES, scaling_cells
from analysis.cells.series import STRATEGY_STYLES
from analysis.figures.figures import FIGURES, figures_for
from analysis.labels import SHARED_CORES
from tests.analysis.figures.drawing import axes_of, sheet_of, texts
from tests.analysis.records import CPU, make_failure, make_record, make_timing, on_ranks

LENGTHS = [8192 * 2**power for power in range(6)]


def local(ms, **config):
    return make_record(config={"strategy": "local"} | config, timing=make_timing([[ms] * 8]))


def ulysses(ms_by_ranks, **config):
    return [
        record
        for ranks, ms in ms_by_ranks.items()
        for record in on_ranks(["ulysses"], [8192], [ranks], lambda *_, ms=ms: ms, **config)
    ]


def by_ranks(summary, column, strategy="ulysses"):
    cells = summary[summary["strategy"] == strategy]
    return dict(zip(cells["cluster.world_size"], cells[column], strict=True))


def test_speed_up_and_efficiency_are_over_local_where_it_did_the_same_work(summary_of):
    base = local(400.0)
    summary = summary_of([base, *ulysses({2: 250.0, 4: 125.0})])
    assert by_ranks(summary, "scaling_speed_up") == pytest.approx({2: 1.6, 4: 3.2})
    assert by_ranks(summary, EFFICIENCY) == pytest.approx({2: 0.8, 4: 0.8})
    assert by_ranks(summary, "scaling_base_cell_id") == dict.fromkeys((2, 4), base["cell_id"])
    assert by_ranks(summary, "scaling_base_strategy") == dict.fromkeys((2, 4), "local")


def test_without_local_they_are_over_the_strategy_s_own_fewest_ranks(summary_of):
    summary = summary_of(ulysses({2: 250.0, 4: 125.0, 8: 100.0}))
    assert by_ranks(summary, "scaling_speed_up") == pytest.approx({2: 1.0, 4: 2.0, 8: 2.5})
    assert by_ranks(summary, EFFICIENCY) == pytest.approx({2: 1.0, 4: 1.0, 8: 0.625})
    assert by_ranks(summary, "scaling_base_ranks") == dict.fromkeys((2, 4, 8), 2)


def test_local_on_more_ranks_than_a_strategy_s_own_fewest_is_no_base(summary_of):
    many = {"cluster.world_size": 4, "dp_shard": 4, "batch": 1}
    summary = summary_of([local(100.0, **many), *ulysses({2: 250.0, 4: 125.0}, batch=4)])
    assert set(by_ranks(summary, "scaling_base_strategy").values()) == {"ulysses"}


def test_of_bases_on_as_many_ranks_the_fastest_counts(summary_of):
    fast, slow = local(400.0, kernel="cudnn"), local(800.0)
    summary = summary_of([slow, fast, *ulysses({2: 250.0, 4: 125.0})])
    assert set(by_ranks(summary, "scaling_base_cell_id").values()) == {fast["cell_id"]}


def test_efficiency_is_tokens_per_s_per_rank_over_the_base_s(summary_of):
    summary = summary_of([local(410.0), *ulysses({2: 250.0, 8: 90.0})])
    rates = by_ranks(summary, "tokens_per_s_per_rank")
    base = by_ranks(summary, "tokens_per_s_per_rank", "local")[1]
    assert by_ranks(summary, EFFICIENCY) == pytest.approx(
        {ranks: rate / base for ranks, rate in rates.items()}
    )


def test_one_number_of_ranks_is_no_scaling(cells_of):
    cells = cells_of([local(400.0), make_record()])
    assert cells.frame[[EFFICIENCY, "scaling_speed_up", "scaling_base_cell_id"]].isna().all(axis=None)
    assert "scaling" not in figures_for(cells)


def test_two_numbers_of_ranks_make_the_figure(cells_of):
    assert "scaling" in figures_for(cells_of(ulysses({2: 250.0, 4: 125.0})))


@pytest.mark.parametrize(
    "other",
    [{"engine": "fsdp2"}, {"dtype": "fp16"}, {"model": "qwen3_4b"}, {"batch": 2}, {"checkpointing": True}],
)
def test_other_work_is_no_base_and_no_second_point(summary_of, other):
    summary = summary_of([*ulysses({2: 250.0}), *ulysses({4: 125.0}, **other)])
    assert summary[EFFICIENCY].isna().all()


def test_scaling_never_crosses_provenance(summary_of):
    predicted = [record | {"provenance": "predicted"} for record in ulysses({4: 125.0})]
    assert summary_of([*ulysses({2: 250.0}), *predicted])[EFFICIENCY].isna().all()


def test_a_cell_that_failed_is_no_base(summary_of):
    config = {"cluster.world_size": 1, "sp_degree": 1}
    records = [make_failure("out_of_memory", "no", config=config), *ulysses({2: 250.0, 4: 125.0})]
    assert set(by_ranks(summary_of(records), "scaling_base_ranks").values()) == {2}


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_the_figure_shows_the_fastest_cell_of_each_number_of_ranks_and_the_ideal(cells_of):
    slower = ulysses({2: 500.0, 4: 500.0}, kernel="math")
    drawn = lines(axes_of("scaling", cells_of([local(400.0), *ulysses({2: 250.0, 4: 125.0}), *slower])))
    assert list(drawn["ulysses, 8k"].get_ydata()) == pytest.approx([0.8, 0.8])
    assert set(drawn["ideal: 100 %"].get_ydata()) == {1}


def test_the_figure_names_its_base(cells_of):
    remarks = sheet_of("scaling", cells_of([local(400.0), *ulysses({2: 250.0, 4: 125.0})])).remarks
    assert any("100 %: local on 1 rank" in text for text in remarks)
    remarks = sheet_of("scaling", cells_of(ulysses({2: 250.0, 4: 125.0}))).remarks
    assert any("100 %: the strategy's own on 2 ranks" in text for text in remarks)


def test_a_cpu_s_figure_says_that_its_ranks_share_cores_and_no_other_does(cells_of):
    on_cpu, on_gpu = (sheet_of("scaling", cells_of(ulysses({2: 9.0, 4: 9.0}, **c))) for c in (CPU, {}))
    assert SHARED_CORES in on_cpu.remarks
    assert SHARED_CORES not in on_gpu.remarks


def test_a_failure_stands_at_its_number_of_ranks(cells_of):
    config = {"cluster.world_size": 1, "sp_degree": 1}
    records = [make_failure("out_of_memory", "no", config=config), *ulysses({2: 250.0, 4: 125.0})]
    sheet = sheet_of("scaling", cells_of(records))
    (mark,) = sheet.panels[0].lines
    assert list(mark.get_xdata()) == [1]
    assert "ulysses, 8k: out of memory" in texts(sheet.figure)


def test_of_too_many_lines_some_lengths_are_drawn_and_the_rest_counted(cells_of):
    cells = cells_of(on_ranks([*STRATEGY_STYLES][1:5], LENGTHS, [2, 4]))
    shown, remarks = scaling_cells(cells)
    assert sorted(shown.frame["seq_len"].unique()) == [LENGTHS[0], LENGTHS[3], LENGTHS[-1]]
    assert remarks == ["3 other lengths in summary.csv"]
    assert len(lines(axes_of("scaling", cells))) == MAX_LINES + 1


def test_every_figure_that_needs_a_column_needs_one_that_the_summary_has(summary_of):
    columns = set(summary_of([make_record()]).columns)
    assert {kind.needs for kind in FIGURES.values() if kind.needs} <= columns
