import functools
import itertools
import math
import re

import pytest

from analysis.cells.cells import CPU_BANNER, SHARED_GPU_BANNER, Cells
from analysis.cells.parts import step_ms
from analysis.cells.selection import Selection, for_figures
from analysis.cells.series import STRATEGY_STYLES, styles_of
from analysis.cells.statuses import EXCLUDED, NOT_KNOWN
from analysis.figures.failures import MAX_ROWS, failure_marks
from analysis.figures.figures import FIGURES, figures_for, write_figure
from analysis.figures.sheet import legend_entries, write_files
from analysis.figures.style import RC, dodge
from bench.strategies import STRATEGIES
from tests.analysis.figures.drawing import axes_of, built, cut_off_in, overlaps_in, sheet_of, texts
from tests.analysis.predictions import make_predicted, with_prediction
from tests.analysis.records import (
    CPU,
    FAILED,
    SHARED_GPU,
    frame_of_records,
    grid,
    make_failure,
    make_record,
    make_trace,
    of_attention,
    on_ranks,
)
from tests.analysis.synthetic import synthetic_records

LENGTHS = [8192, 16384, 32768, 65536, 98304]
OTHER_AXES = {"waterfall", "scaling", "step_parts"}
STRIP = 0
"""The number of the panel with the failures, where there are any."""


@pytest.fixture(params=FIGURES)
def name(request):
    return request.param


@pytest.fixture(params=[name for name in FIGURES if name not in OTHER_AXES])
def name_against_length(request):
    return request.param


def complete(record):
    """A record that every figure shows something of."""
    return with_prediction(of_attention(record))


def of_each_kind():
    """Long names and variants, calls of attention, a traced step of eleven days, failures."""
    slow = {"trace": make_trace(2, step_ms=[1e9] * 2)}
    return [
        *map(complete, on_ranks(["local", "ring_flash_attn_llama3"], LENGTHS, [1, 2], **CPU)),
        of_attention(make_record(config=CPU, **slow)),
        make_failure("error", "no", config=CPU | {"cluster.memory_limit_gib": 4.0}),
        make_failure(
            "wrong_result", "no", config=CPU | {"strategy": "ring_flash_attn_llama3", "seq_len": 4096}
        ),
    ]


def crowded():
    """Many ranks, capacities near one another, and every seventh cell without a result."""
    records = [
        complete(record)
        for limit in (4.0, 4.1, 40.0)
        for record in on_ranks(
            [*STRATEGY_STYLES][1:6], LENGTHS, [1, 2, 4, 8], **{"cluster.memory_limit_gib": limit}
        )
    ]
    failures = ("out_of_memory", "timed_out", "unsupported")
    for record, status in zip(records[::7], itertools.cycle(failures), strict=False):
        record.update(FAILED | {"status": status, "reason": "no"})
    return records


SWEEPS = {
    "one cell": lambda: [complete(make_record())],
    "many cells": lambda: [*map(complete, grid([*STRATEGY_STYLES][:6], LENGTHS))],
    "failures among cells": lambda: synthetic_records(30),
    "a CPU": of_each_kind,
    "all at once": crowded,
}


@pytest.fixture(scope="module")
def drawn_once(tmp_path_factory):
    """Names of a figure and a sweep to its sheet; drawing takes long, so each is drawn once for all tests."""

    @functools.cache
    def cells_of(sweep):
        return Cells.of_records(frame_of_records(tmp_path_factory.mktemp("sweeps"), SWEEPS[sweep]()))

    return functools.cache(lambda name, sweep: built(name, cells_of(sweep)))


def drawn_names(sweep):
    """Those of FIGURES that have something to show of a sweep."""
    without = {
        "one cell": {"scaling"},
        "many cells": {"scaling"},
        "failures among cells": {
            "attention_exchange", "step_parts", "waterfall", "prediction_error", "scaling",
            "attention_of_single", "error_growth",
        },
    }  # fmt: skip
    return [name for name in FIGURES if name not in without.get(sweep, ())]


EVERY_FIGURE = [(sweep, name) for sweep in SWEEPS for name in drawn_names(sweep)]


@pytest.mark.parametrize(("sweep", "name"), EVERY_FIGURE)
def test_no_text_of_a_figure_overlaps_another_or_is_cut_off(drawn_once, sweep, name):
    figure = drawn_once(name, sweep).figure
    assert overlaps_in(figure) == []
    assert cut_off_in(figure) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [288, 3000])
def test_no_two_texts_overlap_where_many_cells_fail(cells_of, count):
    cells = cells_of(synthetic_records(count))
    for name in figures_for(cells):
        figure = built(name, cells).figure
        assert overlaps_in(figure) == []
        assert cut_off_in(figure) == []


@pytest.mark.parametrize("name", ["throughput", "step_parts", "waterfall"])
def test_the_same_records_give_the_same_files(cells_of, drawn_once, name, tmp_path):
    cells = cells_of(SWEEPS["one cell"]())
    for folder, sheet in (("one", drawn_once(name, "one cell")), ("two", built(name, cells))):
        (tmp_path / folder).mkdir()
        write_files(sheet, tmp_path / folder / name)
    for ending in ("png", "svg"):
        one, two = ((tmp_path / folder / f"{name}.{ending}").read_bytes() for folder in ("one", "two"))
        assert one == two


def test_a_figure_in_a_page_has_names_of_its_own_and_nothing_that_two_figures_could_share(cells_of, tmp_path):
    svg = write_figure("throughput", for_figures(cells_of([make_record()])), tmp_path).svg
    names = re.findall(r'\bid="([^"]*)"', svg)
    assert names
    assert all(each.startswith("throughput-") for each in names)
    assert {*re.findall(r'(?:url\(#|href="#)([^")]*)', svg)} <= {*names}


def test_a_figure_without_values_is_left_out_and_of_failures_alone_one_stays(cells_of):
    failed = make_failure("out_of_memory", "no room")
    assert figures_for(cells_of([failed])) == ["throughput"]
    assert figures_for(cells_of([])) == []
    assert "step_parts" not in figures_for(cells_of([make_record(trace=None)]))
    said = texts(built("throughput", cells_of([failed])).figure)
    assert {"No cell has a result (1 OOM)", "ulysses: out of memory"} <= {*said}


@pytest.mark.parametrize(("status", "glyph"), [("out_of_memory", "x"), ("timed_out", "*"), ("error", "*")])
def test_a_failed_cell_has_a_mark_at_its_length_and_a_label(cells_of, name_against_length, status, glyph):
    records = [complete(make_record()), make_failure(status, "no", config={"seq_len": 65536})]
    sheet = sheet_of(name_against_length, cells_of(records))
    (mark,) = [line for line in sheet.panels[STRIP].lines if line.get_marker() == glyph]
    assert list(mark.get_xdata()) == [65536]
    assert mark.get_color() == STRATEGY_STYLES["ulysses"].color
    assert f"ulysses: {status.replace('_', ' ')}" in texts(sheet.figure)


def test_a_failure_among_bars_stands_where_the_bars_of_its_length_would(cells_of):
    records = [make_record(), make_failure("error", "no", config={"seq_len": 65536})]
    sheet = sheet_of("step_parts", cells_of(records))
    (mark,) = sheet.panels[STRIP].lines
    labels = dict(zip(sheet.axes.get_xticks(), sheet.axes.get_xticklabels(), strict=True))
    assert [labels[place].get_text() for place in mark.get_xdata()] == ["64k"]


def test_a_mark_stands_inside_the_axes_in_line_with_the_other_cells_of_its_length(drawn_once):
    strip, axes = drawn_once("throughput", "failures among cells").panels
    assert strip.get_xlim() == axes.get_xlim()
    assert strip.get_position().x0 == pytest.approx(axes.get_position().x0)
    bottom, top = sorted(strip.get_ylim())
    for line in strip.lines:
        assert all(strip.get_xlim()[0] < x < strip.get_xlim()[1] for x in line.get_xdata())
        assert all(bottom < y < top for y in line.get_ydata())


def test_failures_of_one_series_and_status_are_one_row_and_of_too_many_series_are_told_by_status(cells_of):
    failing = [16384, 32768, 98304]
    records = [make_failure("out_of_memory", "no", config={"seq_len": each}) for each in failing]
    (mark,) = failure_marks(cells_of([*grid(["local"], LENGTHS), *records]).series)
    assert mark.places == (16384, 32768, 98304)
    many = [make_failure("error", "no", config={"strategy": each}) for each in STRATEGY_STYLES]
    assert len(many) > MAX_ROWS
    (mark,) = failure_marks(cells_of(many).series)
    assert mark.label == "error"


def test_error_bars_stand_only_where_an_interval_does(cells_of):
    timing = make_record()["timing"]
    few = timing | {"step_times_ms": [[100.0] * 5] * 2}
    with_bars, without = (
        axes_of("throughput", cells_of([make_record(timing=each)])).containers[0].has_yerr
        for each in (timing, few)
    )
    assert (with_bars, without) == (True, False)


@pytest.mark.parametrize(
    ("config", "banner"), [(CPU, CPU_BANNER), (SHARED_GPU, SHARED_GPU_BANNER), ({}, None)]
)
def test_every_figure_of_cells_that_are_not_ranked_says_so_in_one_line(cells_of, config, banner):
    cells = cells_of([make_record(config=config)])
    for name in ("throughput", "waterfall"):
        found = {CPU_BANNER, SHARED_GPU_BANNER} & {*texts(built(name, cells).figure)}
        assert found == ({banner} if banner else set())


def test_every_figure_says_what_was_measured_on_what(drawn_once):
    for name in drawn_names("one cell"):
        expected = "measured: qwen3_nano, zero3, bf16 on NVIDIA H100 80GB HBM3, 2 ranks"
        assert expected in texts(drawn_once(name, "one cell").figure)


def test_a_figure_of_a_part_of_the_series_says_so(cells_of):
    cells = cells_of([make_record()])
    from analysis.figures.figures import build

    assert "a part of the series; all are in summary.csv" in texts(
        build("throughput", Selection(cells, "24 of 30")).figure
    )


def test_lengths_are_labelled_8k_and_96k(cells_of, name_against_length):
    cells = cells_of([*map(complete, grid(["local"], [8192, 32768, 98304]))])
    labels = {label.get_text() for label in axes_of(name_against_length, cells).get_xticklabels()}
    assert {"8k", "32k", "96k"} <= labels


def test_a_line_does_not_run_across_a_failed_length(cells_of):
    records = [*grid(["ulysses"], [8192, 32768]), make_failure("error", "no", config={"seq_len": 16384})]
    line = axes_of("throughput", cells_of(records)).containers[0].lines[0]
    assert [value == value for value in line.get_ydata()] == [True, False, True]  # noqa: PLR0124  NaN


@pytest.mark.parametrize(("lengths", "scale"), [([8192, 32768], "linear"), ([8192, 65536], "log")])
def test_tokens_per_s_over_many_lengths_are_on_a_logarithmic_axis(cells_of, lengths, scale):
    records = on_ranks(["ulysses"], lengths, [2], lambda length, _: length**2 / 1e6)
    assert axes_of("throughput", cells_of(records)).get_yscale() == scale


@pytest.mark.parametrize("name", ["throughput", "step_parts"])
def test_the_second_engine_of_a_strategy_has_hollow_markers(cells_of, name):
    records = [make_record(config={"engine": engine}) for engine in ("ddp", "zero3")]
    drawn = [
        line
        for line in axes_of(name, cells_of(records)).lines
        if line.get_marker() == "s" and len(line.get_xdata())
    ]
    assert [each.get_fillstyle() for each in drawn] == ["full", "none"]


def test_every_strategy_of_ours_has_a_look_and_a_mark_that_no_other_has():
    assert {*STRATEGIES} == {*STRATEGY_STYLES}
    assert len({look.marker for look in STRATEGY_STYLES.values()}) == len(STRATEGY_STYLES)


def test_a_plug_in_s_strategy_looks_the_same_whatever_is_drawn_beside_it():
    alone = styles_of(["something_new"])["something_new"]
    assert styles_of([*STRATEGY_STYLES, "something_new"])["something_new"] == alone
    assert alone not in STRATEGY_STYLES.values()
    names = [f"somebodys_{number}" for number in range(20)]
    assert len({*styles_of(names).values()}) == len(names)


def test_points_of_neighbouring_lengths_never_change_places():
    lengths = [65536, 98304]
    assert lengths[0] * dodge(29, 30, lengths) < lengths[1] * dodge(0, 30, lengths)


def test_the_bars_of_a_step_fill_it_and_none_is_cut_off(cells_of):
    for lengths in (LENGTHS, [8192], [8192, 16384]):
        axes = axes_of("step_parts", cells_of(grid(["local", "ulysses"], lengths)))
        tops = {}
        for bar in axes.patches:
            tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
        assert len(tops) == 2 * len(lengths)
        assert all(top == pytest.approx(1) for top in tops.values())
        left, right = axes.get_xlim()
        assert all(left <= bar.get_x() and bar.get_x() + bar.get_width() <= right for bar in axes.patches)


def waterfall(cells):
    """Per panel its title, and the labels and ends of its bars from the top."""
    return {
        axes.texts[-1].get_text(): [
            (label.get_text(), bar.get_x(), bar.get_x() + bar.get_width())
            for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
        ]
        for axes in sheet_of("waterfall", cells).panels
    }


def test_a_waterfall_goes_part_by_part_from_ideal_attention_down_to_the_whole_step(cells_of):
    cells = cells_of([make_record(config={"strategy": "local"}), make_record()])
    panels = waterfall(cells)
    assert [*panels] == ["local", "ulysses"]
    (first, *_), (last, start, end) = panels["ulysses"], panels["ulysses"][-1]
    assert (first[0], first[1], last, start) == ("ideal attention", 0, "whole step", 0)
    assert end == pytest.approx(step_ms(cells.rows[1]))
    parts = panels["ulysses"][:-1]
    assert all(two[1] == pytest.approx(one[2]) for one, two in itertools.pairwise(parts))
    assert parts[-1][2] == pytest.approx(end)


def test_a_waterfall_shows_no_part_that_took_no_time(cells_of):
    trace = make_trace(2, idle_ms=[0.0] * 2)
    (panel,) = waterfall(cells_of([make_record(trace=trace)])).values()
    assert not {"idle", "load imbalance", "device copies"} & {label for label, *_ in panel}


def test_attention_that_took_less_than_ideal_goes_to_the_left(cells_of):
    records = [
        make_record(config={"strategy": "local"}, trace=make_trace(1, 70.0)),
        make_record(trace=make_trace(2, 30.0)),
    ]
    (_, beyond, *_) = waterfall(cells_of(records))["ulysses"]
    assert (beyond[0], beyond[1], beyond[2]) == ("attention beyond ideal", 35, 30)


def test_a_waterfall_says_what_ideal_is_and_where_it_is_not_known(cells_of):
    known = [make_record(config={"strategy": "local"}), make_record()]
    for records, title, said in (
        (
            known,
            "From ideal attention to the whole step",
            "local's attention time for the same work, times local's GPUs, divided by the cell's",
        ),
        (known[1:], "From attention to the whole step", "Without an ideal where local has no traced step"),
    ):
        sheet = sheet_of("waterfall", cells_of(records))
        assert sheet.heading.title == title
        assert any(said in remark for remark in sheet.remarks)


def test_a_waterfall_is_of_the_longest_of_the_lengths_that_most_strategies_ran(cells_of):
    records = [*grid(["local", "ulysses"], LENGTHS[:3]), *grid(["ulysses"], LENGTHS[3:])]
    sheet = sheet_of("waterfall", cells_of(records))
    assert sheet.axes.get_xlabel() == "ms of one step at 32k"


def test_sizes_on_a_logarithmic_axis_are_powers_of_two(cells_of):
    memory = {"peak_allocated_bytes": [3 * 2**20]}, {"peak_allocated_bytes": [5 * 2**30]}
    records = [make_record(config={"seq_len": 8192 * 2**i}, memory=each) for i, each in enumerate(memory)]
    axes = axes_of("peak_memory", cells_of(records))
    assert axes.get_yscale() == "log"
    assert {math.log2(tick) % 1 for tick in axes.get_yticks()} == {0}


def test_a_memory_axis_says_where_its_ticks_are(cells_of):
    axes = axes_of("peak_memory", cells_of([make_record(memory={"peak_allocated_bytes": [2 * 2**30]})]))
    labels = [axes.yaxis.get_major_formatter()(tick, None) for tick in axes.get_yticks()]
    assert labels[:3] == ["0 GiB", "0.5 GiB", "1 GiB"]
    assert [float(label.removesuffix(" GiB")) * 2**30 for label in labels] == [*axes.get_yticks()]


UNKNOWN = {"purpose_exposed_ms": None, "purpose_exposed_waiting_ms": None}
OF_A_TRACE = ("attention_exchange", "communication_share", "step_parts")


def of_one_length(traces):
    return [make_record(config={"strategy": name}, trace=trace) for name, trace in traces.items()]


@pytest.mark.parametrize("name", OF_A_TRACE)
@pytest.mark.parametrize(
    ("without", "said"),
    [({"step_ms": [400.0] * 2}, EXCLUDED), ({"unjoined": ["no tap"] * 2, **UNKNOWN}, NOT_KNOWN)],
)
def test_a_traced_cell_without_a_value_is_marked_as_excluded(cells_of, name, without, said):
    traces = {"ring": make_trace(2), "ulysses": make_trace(2, **without), "usp": None}
    sheet = sheet_of(name, cells_of(of_one_length(traces)))
    assert f"ulysses: {said}" in texts(sheet.figure)
    assert not any("usp" in text for text in [*texts(sheet.figure), *legend_entries(sheet)])


@pytest.mark.parametrize("name", ["attention_exchange", "communication_share"])
def test_the_legend_says_what_stands_beside_the_points_last(cells_of, name):
    cells = cells_of(of_one_length({"ring": make_trace(2), "ulysses": make_trace(2)}))
    assert [*legend_entries(sheet_of(name, cells))] == ["ring", "ulysses", "waiting for the last rank"]


def bars_of(axes):
    """Both ends of every error bar of the first series."""
    (bars,) = axes.containers[0].lines[2]
    return [tuple(segment[:, 1]) for segment in bars.get_segments()]


def test_a_prediction_s_bars_are_its_band_and_a_measurement_s_its_interval(cells_of):
    measured = with_prediction(make_record(), step_ms=(10.0, 20.0, 30.0))
    steady = bars_of(axes_of("throughput", cells_of([measured])))
    assert steady == [pytest.approx((81920, 81920))]
    axes = axes_of("throughput", cells_of([make_predicted(step_ms=(80.0, 100.0, 128.0))]))
    assert bars_of(axes) == [pytest.approx((64000, 102400))]


def test_where_memory_is_undecided_the_figure_of_memory_alone_marks_it(cells_of):
    cells = cells_of([make_predicted(fit="undecided"), make_predicted(config={"seq_len": 16384})])
    shown = {name: texts(sheet_of(name, cells).figure) for name in ("peak_memory", "throughput")}
    said = "ulysses: undecided (predicted)"
    assert said in shown["peak_memory"]
    assert said not in shown["throughput"]
    alone = sheet_of("throughput", cells_of([make_predicted(fit="out_of_memory")]))
    assert "ulysses: OOM (predicted)" in texts(alone.figure)


def test_a_figure_of_predictions_speaks_of_no_sample_interval_or_trace(cells_of):
    cells = cells_of([make_predicted()])
    for name in figures_for(cells):
        sheet = built(name, cells)
        said = " ".join([*texts(sheet.figure), FIGURES[name].reading_of(cells)])
        assert not [words for words in ("95 % interval", "traced step", "median of") if words in said]
        assert "Predicted: " in said


def test_the_bars_of_an_error_reach_zero_where_the_measurement_lies_in_the_band(cells_of):
    records = [with_prediction(make_record(), step_ms=ms) for ms in ((80.0, 90.0, 99.0), (80.0, 90.0, 101.0))]
    for record, reaches in zip(records, (False, True), strict=True):
        axes = axes_of("prediction_error", cells_of([record]))
        ((low, high),) = bars_of(axes)
        assert (low < 0 <= high) == reaches
        assert axes.get_ylim()[0] <= low


def test_text_stays_text_in_a_vector_file():
    assert RC["svg.fonttype"] == "none"
