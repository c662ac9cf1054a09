import functools
import itertools
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.cells.cells import CPU_BANNER, SHARED_GPU_BANNER, Cells
from analysis.cells.selection import for_figures
from analysis.cells.series import STRATEGY_STYLES, styles_of
from analysis.figures.drawing import NARROW_INCHES, WIDTH_INCHES, build_figure, png_bytes, svg_bytes
from analysis.figures.failures import failure_marks
from analysis.figures.figures import AGAINST_LENGTH, FIGURES, figures_for, legend_entries
from analysis.figures.style import dodge
from analysis.labels import status_label
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
LEGIBLE_PX = 11
WIDE_PX, NARROW_PX = 640, 340
"""How wide a page of 1400 px shows one of two figures in a row, and one of 390 px each, less a scroll bar."""


def texts(figure):
    """Every text of a figure, its lines joined to one."""
    return [
        text.get_text().replace("\n", " ") for text in figure.findobj(lambda each: hasattr(each, "get_text"))
    ]


def axes_of(name, cells):
    axes = Figure().add_subplot()
    FIGURES[name].draw(cells, axes)
    return axes


@pytest.fixture(params=FIGURES)
def name(request):
    return request.param


@pytest.fixture(params=[name for name, kind in FIGURES.items() if kind.against == AGAINST_LENGTH])
def name_against_length(request):
    return request.param


def of_each_kind(**config):
    """Long names, calls of attention, a traced step of eleven days and a failure."""
    records = on_ranks(["local", "ring_flash_attn_llama3"], LENGTHS, [1, 2], **config)
    slow = {"trace": make_record()["trace"] | {"step_ms": [1e9] * 2}}
    return [
        *records,
        of_attention(make_record(config=config, **slow)),
        make_failure("error", "no", config=config),
    ]


def crowded():
    """Many ranks, capacities near one another, and every seventh cell without a result."""
    records = [
        record
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
    "no cells": list,
    "one cell": lambda: [make_record()],
    "many cells": lambda: grid([*STRATEGY_STYLES][:6], LENGTHS),
    "a failure alone": lambda: [make_failure("out_of_memory", "no room")],
    "failures among cells": lambda: synthetic_records(30),
    "a CPU": lambda: of_each_kind(**CPU | {"cluster.memory_limit_gib": 4.0}),
    "all at once": crowded,
}


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    """What of a sweep of SWEEPS is drawn, by its name."""

    def selected(sweep):
        folder = tmp_path_factory.mktemp("sweeps")
        return for_figures(Cells.of_records(frame_of_records(folder, SWEEPS[sweep]())))

    return functools.cache(selected)


@pytest.fixture(scope="module")
def drawn_once(selected):
    """Names of a figure and a sweep to it; drawing takes long, so each is drawn once for all tests."""

    def drawn(name, sweep, width=WIDTH_INCHES):
        shown = selected(sweep)
        return build_figure(name, shown.cells, shown.note, width)

    return functools.cache(drawn)


@pytest.mark.parametrize("sweep", ["no cells", "one cell", "many cells"])
def test_a_figure_is_drawn_for_any_number_of_cells(drawn_once, name, sweep):
    assert ("No records" in texts(drawn_once(name, sweep))) == (sweep == "no cells")


@pytest.mark.parametrize("name", ["throughput", "step_parts", "scaling"])
def test_a_figure_is_a_png_and_an_svg_of_which_the_same_records_give_the_same(cells_of, drawn_once, name):
    figure = drawn_once(name, "one cell")
    assert png_bytes(figure).startswith(b"\x89PNG")
    svg = svg_bytes(figure)
    assert b"<svg" in svg
    assert not re.search(rb'clipPath id="(?!clip\d+")', svg)  # named after memory addresses
    assert svg == svg_bytes(build_figure(name, cells_of([make_record()])))


def test_a_figure_without_usable_cells_says_so_and_shows_the_failures(drawn_once, name):
    figure = drawn_once(name, "a failure alone")
    assert any(text.startswith("No cell has a") and "1 OOM" in text for text in texts(figure))
    assert "OOM" in texts(figure)


@pytest.mark.parametrize(("status", "glyph"), [("out_of_memory", "x"), ("timed_out", "*"), ("error", "*")])
def test_a_failed_cell_has_its_own_mark_at_its_length(cells_of, name_against_length, status, glyph):
    records = [make_record(), make_failure(status, "no", config={"seq_len": 65536})]
    lines = axes_of(name_against_length, cells_of(records)).lines
    marks = [line for line in lines if line.get_marker() == glyph]
    assert [list(mark.get_xdata()) for mark in marks] == [[65536]]
    assert marks[0].get_color() == STRATEGY_STYLES["ulysses"].color


def test_no_data_point_reaches_into_the_lane_of_the_failures(cells_of, name_against_length):
    records = [with_prediction(of_attention(record)) for record in grid(["local", "ulysses"], LENGTHS)]
    records.append(make_failure("killed", "no", config={"seq_len": 4096}))
    axes = axes_of(name_against_length, cells_of(records))
    lane = next(line for line in axes.lines if list(line.get_xdata()) == [0, 1]).get_ydata()[0]
    points = [
        point for line in axes.lines if line.get_transform() == axes.transData for point in line.get_xydata()
    ]
    in_axes = axes.transAxes.inverted().transform(axes.transData.transform(points))
    assert np.nanmax(in_axes[:, 1]) < lane < 1


def test_error_bars_stand_only_where_an_interval_does(cells_of):
    timing = make_record()["timing"]
    few = timing | {"step_times_ms": [[100.0] * 5] * 2}
    with_bars, without = (
        axes_of("throughput", cells_of([make_record(timing=each)])).containers[0].has_yerr
        for each in (timing, few)
    )
    assert (with_bars, without) == (True, False)


def banners_in(figure):
    return {each for each in (CPU_BANNER, SHARED_GPU_BANNER) if each in " ".join(texts(figure))}


@pytest.mark.parametrize(("sweep", "banners"), [("a CPU", {CPU_BANNER}), ("one cell", set())])
def test_every_figure_of_cells_that_rank_nothing_says_so_and_no_other_does(drawn_once, name, sweep, banners):
    assert banners_in(drawn_once(name, sweep)) == banners


@pytest.mark.parametrize(
    ("config", "banners"), [(SHARED_GPU, {SHARED_GPU_BANNER}), ({"cluster.ranks_per_gpu": 1}, set())]
)
def test_a_figure_says_whether_ranks_share_a_gpu(cells_of, config, banners):
    assert banners_in(build_figure("throughput", cells_of([make_record(config=config)]))) == banners


def test_every_figure_says_what_was_measured_on_what(drawn_once, name):
    expected = "measured, h100_80gb, NVIDIA H100 80GB HBM3, qwen3_nano, zero3, bf16, train, 2 ranks"
    assert expected in " ".join(texts(drawn_once(name, "one cell")))


def test_lengths_are_labelled_8k_and_96k(drawn_once, name_against_length):
    figure = drawn_once(name_against_length, "many cells")
    assert {"8k", "64k", "96k"} <= {label.get_text() for label in figure.axes[0].get_xticklabels()}


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


def test_no_two_strategies_look_alike():
    looks = styles_of([*STRATEGY_STYLES, *(f"somebodys_{number}" for number in range(6))]).values()
    assert len({look.color for look in looks}) == len(looks) == len(STRATEGY_STYLES) + 6
    known = styles_of(STRATEGY_STYLES).values()
    assert all(a.color != b.color and a.marker != b.marker for a, b in itertools.combinations(known, 2))


def test_an_unknown_strategy_looks_the_same_whatever_is_drawn_beside_it():
    alone = styles_of(["something_new"])["something_new"]
    assert styles_of([*STRATEGY_STYLES, "something_new"])["something_new"] == alone
    assert alone not in STRATEGY_STYLES.values()
    assert styles_of(["b", "a", "ring"]) == styles_of(["ring", "a", "b"])


def test_more_unknown_strategies_than_colours_have_a_look_each():
    names = [f"somebodys_{number}" for number in range(20)]
    assert styles_of(names).keys() == set(names)


def test_points_of_neighbouring_lengths_never_change_places():
    lengths = [65536, 98304]
    last = lengths[0] * dodge(29, 30, lengths)
    assert last < lengths[1] * dodge(0, 30, lengths)


def test_the_bars_of_a_step_fill_it(cells_of):
    axes = axes_of("step_parts", cells_of(grid(["local", "ulysses"], LENGTHS)))
    tops = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
    assert len(tops) == 2 * len(LENGTHS)
    assert all(top == pytest.approx(1) for top in tops.values())


def test_no_bar_of_a_step_is_cut_off(cells_of, drawn_once):
    few = [cells_of(grid([*STRATEGY_STYLES][:6], lengths)) for lengths in ([8192], [8192, 16384])]
    many = drawn_once("step_parts", "many cells").axes[0]
    for axes in (many, *(axes_of("step_parts", cells) for cells in few)):
        left, right = axes.get_xlim()
        assert all(left <= bar.get_x() and bar.get_x() + bar.get_width() <= right for bar in axes.patches)


def test_every_part_of_a_waterfall_begins_where_the_one_before_ends(cells_of):
    axes = axes_of("waterfall", cells_of([make_record(config={"strategy": "local"}), make_record()]))
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert bars[0][0] == 0
    for (_, end), (start, _) in itertools.pairwise(bars):
        assert start == pytest.approx(end) or (start == 0 and end == pytest.approx(1))
    assert bars[-1][1] == pytest.approx(1)


def test_a_waterfall_of_many_cells_says_how_many_it_leaves_out(cells_of):
    records = grid([*STRATEGY_STYLES], [2**n for n in range(10, 20)])
    figure = axes_of("waterfall", cells_of(records)).get_figure()
    assert any(text.startswith("and 20 more cells") for text in texts(figure))


def boxes_of_texts(figure):
    figure.draw_without_rendering()
    shown = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip()]
    return {(id(each), each.get_text()): each.get_window_extent() for each in shown}


@pytest.mark.parametrize("sweep", ["no cells", "one cell", "many cells", "failures among cells"])
def test_no_two_texts_of_a_figure_overlap(drawn_once, name, sweep):
    assert overlaps_in(drawn_once(name, sweep)) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [288, 3000])
def test_no_two_texts_overlap_where_many_cells_fail(cells_of, name, count):
    drawn = for_figures(cells_of(synthetic_records(count)))
    assert overlaps_in(build_figure(name, drawn.cells, drawn.note)) == []


def test_the_sentence_of_an_empty_figure_stands_clear_of_many_failures(cells_of):
    cells = for_figures(cells_of(synthetic_records(288))).cells
    figure = build_figure("step_parts", cells)
    assert any(text.startswith("No cell has a split") for text in texts(figure))
    assert overlaps_in(figure) == []


def test_no_text_overlaps_or_is_cut_off_where_ranks_and_capacities_are_many_and_cells_fail(drawn_once, name):
    figure = drawn_once(name, "all at once")
    assert overlaps_in(figure) == []
    assert not is_cut_off(figure)


@pytest.mark.parametrize("width", [WIDTH_INCHES, NARROW_INCHES])
def test_no_text_is_cut_off_at_the_edge_of_a_figure(drawn_once, name, width):
    assert not is_cut_off(drawn_once(name, "a CPU", width))


@pytest.mark.slow
@pytest.mark.parametrize("width", [WIDTH_INCHES, NARROW_INCHES])
def test_no_text_is_cut_off_at_the_edge_of_a_gpu_s_figure(cells_of, name, width):
    assert not is_cut_off(build_figure(name, cells_of(of_each_kind()), width=width))


def test_for_narrow_screens_a_figure_s_texts_are_all_there_legible_and_apart(drawn_once, selected, name):
    figure = drawn_once(name, "failures among cells", NARROW_INCHES)
    assert overlaps_in(figure) == []
    assert not is_cut_off(figure)
    assert smallest_text_px(figure, NARROW_PX) >= LEGIBLE_PX
    marks = FIGURES[name].marks(selected("failures among cells").cells)
    failed = {f"{mark.series}: {status_label(mark.status)}" for mark in marks}
    assert failed <= {*texts(figure)}


def test_no_text_of_a_figure_is_small_where_two_share_a_page_1400_px_wide(drawn_once, name):
    assert smallest_text_px(drawn_once(name, "many cells"), WIDE_PX) >= LEGIBLE_PX


def smallest_text_px(figure, width_px):
    """How high the smallest letters are on a page that shows the figure so wide."""
    shown = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip()]
    return min(each.get_fontsize() for each in shown) / 72 * width_px / figure.get_size_inches()[0]


def is_cut_off(figure):
    """Whether anything drawn reaches over the figure's edge, by more than a hundredth of an inch."""
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return min(box.x0, box.y0, width - box.x1, height - box.y1) < -0.01


def overlaps_in(figure):
    return [
        (one[1], two[1])
        for (one, a), (two, b) in itertools.combinations(boxes_of_texts(figure).items(), 2)
        if a.x0 + 1 < b.x1 and b.x0 + 1 < a.x1 and a.y0 + 1 < b.y1 and b.y0 + 1 < a.y1
    ]


def test_failures_at_neighbouring_lengths_are_named_once_and_others_each(cells_of):
    failing = [16384, 32768, 98304]
    records = [
        *grid(["local"], LENGTHS),
        *(make_failure("out_of_memory", "no", config={"seq_len": each}) for each in failing),
    ]
    marks = failure_marks(cells_of(records).series)
    assert [mark.places for mark in marks] == [(16384, 32768), (98304,)]


def test_sizes_on_a_logarithmic_axis_are_powers_of_two(cells_of):
    memory = {"peak_allocated_bytes": [3 * 2**20]}, {"peak_allocated_bytes": [5 * 2**30]}
    records = [make_record(config={"seq_len": 8192 * 2**i}, memory=each) for i, each in enumerate(memory)]
    axes = axes_of("peak_memory", cells_of(records))
    assert axes.get_yscale() == "log"
    assert {math.log2(tick) % 1 for tick in axes.get_yticks()} == {0}


def test_between_the_powers_of_two_nothing_is_named(cells_of):
    """As between 19 and 440 MiB, where matplotlib would."""
    memory = [{"peak_allocated_bytes": [size * 2**20]} for size in (19, 150, 440)]
    records = [make_record(config={"seq_len": 8192 * 2**i}, memory=each) for i, each in enumerate(memory)]
    assert not overlaps_in(build_figure("peak_memory", cells_of(records)))


def test_a_memory_axis_says_where_its_ticks_are(cells_of):
    axes = axes_of("peak_memory", cells_of([make_record(memory={"peak_allocated_bytes": [2 * 2**30]})]))
    labels = [axes.yaxis.get_major_formatter()(tick, None) for tick in axes.get_yticks()]
    assert labels[:3] == ["0 GiB", "0.25 GiB", "0.5 GiB"]
    assert [float(label.removesuffix(" GiB")) * 2**30 for label in labels] == [*axes.get_yticks()]


UNKNOWN = {"purpose_exposed_ms": None, "purpose_exposed_waiting_ms": None}
OF_A_TRACE = ("attention_exchange", "communication_share", "step_parts")


def of_one_length(traces):
    return [make_record(config={"strategy": name}, trace=trace) for name, trace in traces.items()]


@pytest.mark.parametrize("name", OF_A_TRACE)
@pytest.mark.parametrize(
    ("without", "said"),
    [({"step_ms": [400.0] * 2}, "void"), ({"unjoined": ["no tap"] * 2, **UNKNOWN}, "not known")],
)
def test_a_traced_cell_without_a_value_is_named(cells_of, name, without, said):
    traces = {"ring": make_trace(2), "ulysses": make_trace(2, **without), "usp": None}
    axes = axes_of(name, cells_of(of_one_length(traces)))
    found = texts(axes.get_figure())
    assert said in found
    assert "ulysses" in found
    assert "usp" not in {*found, *legend_entries(axes)}
    only = texts(axes_of(name, cells_of(of_one_length({"ulysses": traces["ulysses"]}))).get_figure())
    assert any(text.endswith(f"(1 {said})") for text in only)


@pytest.mark.parametrize("name", ["attention_exchange", "communication_share"])
def test_the_legend_says_what_stands_beside_the_points_last(cells_of, name):
    cells = cells_of(of_one_length({"ring": make_trace(2), "ulysses": make_trace(2)}))
    assert [*legend_entries(axes_of(name, cells))] == ["ring", "ulysses", "waiting for the last rank"]
    untraced = cells_of(of_one_length({"ring": None}))
    assert legend_entries(axes_of(name, untraced)) == {}


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
    shown = {name: texts(axes_of(name, cells).get_figure()) for name in ("peak_memory", "throughput")}
    assert "undecided (predicted)" in shown["peak_memory"]
    assert "undecided (predicted)" not in shown["throughput"]
    alone = axes_of("throughput", cells_of([make_predicted(fit="out_of_memory")]))
    assert "OOM (predicted)" in texts(alone.get_figure())


def test_a_figure_of_predictions_speaks_of_no_sample_interval_or_trace(cells_of):
    cells = cells_of([make_predicted()])
    for name in figures_for(cells):
        said = " ".join(texts(build_figure(name, cells)))
        assert not [words for words in ("95 % interval", "traced step", "median of") if words in said]
        assert "Predicted: " in said


def test_the_bars_of_an_error_reach_zero_where_the_measurement_lies_in_the_band(cells_of):
    records = [with_prediction(make_record(), step_ms=ms) for ms in ((80.0, 90.0, 99.0), (80.0, 90.0, 101.0))]
    for record, reaches in zip(records, (False, True), strict=True):
        axes = axes_of("prediction_error", cells_of([record]))
        ((low, high),) = bars_of(axes)
        assert (low < 0 <= high) == reaches
        assert axes.get_ylim()[0] <= low
