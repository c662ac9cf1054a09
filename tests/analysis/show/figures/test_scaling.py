import pytest

from analysis.labels import SHARED_CORES
from analysis.show.figures.figures import figures_for
from analysis.show.figures.scaling import BASES, EFFICIENCY, MAX_LINES, scaling_cells
from bench.strategies import STRATEGIES
from tests.support.drawing import axes_of, sheet_of, texts_of
from tests.support.records import CPU, make_failure, make_record, make_timing, on_ranks

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


def test_scaling_base_is_local_with_the_same_work(summary_of):
    base = local(400.0)
    summary = summary_of([base, *ulysses({2: 250.0, 4: 125.0})])
    assert by_ranks(summary, "scaling_speed_up") == pytest.approx({2: 1.6, 4: 3.2})
    assert by_ranks(summary, EFFICIENCY) == pytest.approx({2: 0.8, 4: 0.8})
    assert by_ranks(summary, "scaling_base_cell_id") == dict.fromkeys((2, 4), base["cell_id"])
    assert by_ranks(summary, "scaling_base_strategy") == dict.fromkeys((2, 4), "local")


def test_scaling_base_without_local_is_the_fewest_ranks(summary_of):
    summary = summary_of(ulysses({2: 250.0, 4: 125.0, 8: 100.0}))
    assert by_ranks(summary, "scaling_speed_up") == pytest.approx({2: 1.0, 4: 2.0, 8: 2.5})
    assert by_ranks(summary, EFFICIENCY) == pytest.approx({2: 1.0, 4: 1.0, 8: 0.625})
    assert by_ranks(summary, "scaling_base_ranks") == dict.fromkeys((2, 4, 8), 2)


def test_local_on_more_ranks_is_no_scaling_base(summary_of):
    many = {"cluster.world_size": 4, "dp_shard": 4, "batch": 1}
    summary = summary_of([local(100.0, **many), *ulysses({2: 250.0, 4: 125.0}, batch=4)])
    assert set(by_ranks(summary, "scaling_base_strategy").values()) == {"ulysses"}


def test_fastest_base_of_equal_ranks_counts(summary_of):
    fast, slow = local(400.0, kernel="cudnn"), local(800.0)
    summary = summary_of([slow, fast, *ulysses({2: 250.0, 4: 125.0})])
    assert set(by_ranks(summary, "scaling_base_cell_id").values()) == {fast["cell_id"]}


def test_one_number_of_ranks_has_no_scaling(cells_of):
    cells = cells_of([local(400.0), make_record()])
    assert cells.frame[[EFFICIENCY, "scaling_speed_up", "scaling_base_cell_id"]].isna().all(axis=None)
    assert "scaling" not in figures_for(cells)


def test_other_work_or_provenance_is_no_scaling_base(summary_of):
    other, replayed = ulysses({4: 125.0}, engine="fsdp2"), ulysses({4: 125.0})
    for second in (other, [record | {"provenance": "replayed"} for record in replayed]):
        assert summary_of([*ulysses({2: 250.0}), *second])[EFFICIENCY].isna().all()


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_scaling_figure_has_fastest_cells_ideal_and_base(cells_of):
    own = ulysses({2: 250.0, 4: 125.0})
    slower = ulysses({2: 500.0, 4: 500.0}, kernel="math")
    sheet = sheet_of("scaling", cells_of([local(400.0), *own, *slower]))
    drawn = lines(sheet.axes)
    assert list(drawn["ulysses, 8k"].get_ydata()) == pytest.approx([0.8, 0.8])
    assert set(drawn["ideal: 100 %"].get_ydata()) == {1}
    assert sheet.remarks == [BASES]
    assert sheet.hover_areas[0].text == "ulysses, 8k, 2 ranks: 80.0 % of the rate per rank of local on 1"
    assert SHARED_CORES in sheet_of("scaling", cells_of(ulysses({2: 9.0, 4: 9.0}, **CPU))).remarks


def test_failed_cell_is_no_base_and_is_marked_at_its_ranks(cells_of):
    config = {"cluster.world_size": 1, "sp_degree": 1}
    records = [make_failure("out_of_memory", "no", config=config), *ulysses({2: 250.0, 4: 125.0})]
    assert set(by_ranks(cells_of(records).frame, "scaling_base_ranks").values()) == {2}
    sheet = sheet_of("scaling", cells_of(records))
    (mark,) = sheet.panels[0].lines
    assert list(mark.get_xdata()) == [1]
    assert "ulysses, 8k: out of memory" in texts_of(sheet.figure)


def test_scaling_figure_draws_only_the_longest_lengths(cells_of):
    cells = cells_of(on_ranks([*STRATEGIES.built_in][1:5], LENGTHS, [2, 4]))
    shown, remarks = scaling_cells(cells)
    assert sorted(shown.frame["seq_len"].unique()) == LENGTHS[3:]
    assert remarks == [BASES, "Left out: 3 other lengths (in summary.csv)"]
    assert len(lines(axes_of("scaling", cells))) == MAX_LINES + 1
