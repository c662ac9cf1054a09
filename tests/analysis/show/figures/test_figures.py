import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.text import Text

from analysis.cells.cells import CPU_CAVEAT, SHARED_GPU_CAVEAT
from analysis.cells.selection import Selection, select_for_figures
from analysis.cells.series import OTHER_MARKERS, OTHER_STYLES, styles_of
from analysis.cells.statuses import EXCLUDED, NOT_KNOWN
from analysis.show.figures.failures import MAX_ROWS, failure_marks
from analysis.show.figures.figures import FIGURES, draw_figure, figures_for, write_figure
from analysis.show.figures.sheet import legend_entries
from bench.strategies import STRATEGIES
from bench.strategies.plot_style import PlotStyle
from tests.support.drawing import axes_of, built_figure, cut_off_in, overlaps_in, sheet_of, texts_of
from tests.support.records import (
    CPU,
    FAILED,
    SHARED_GPU,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
    make_trace,
    on_ranks,
    with_attention_calls,
    with_prediction,
)
from tests.support.synthetic import synthetic_records

LENGTHS = [8192, 16384, 32768, 65536, 98304]


def complete(record):
    """Return a record with values for every figure."""
    return with_prediction(with_attention_calls(record))


def of_each_kind():
    """Return records with long names, variants, attention calls, a step of eleven days, and failures."""
    slow = {"trace": make_trace(2, step_ms=[1e9] * 2)}
    return [
        *map(complete, on_ranks(["local", "ring_flash_attn_llama3"], LENGTHS, [1, 2], **CPU)),
        with_attention_calls(make_record(config=CPU, **slow)),
        make_failure("error", "no", config=CPU | {"cluster.memory_limit_gib": 4.0}),
        make_failure(
            "wrong_result", "no", config=CPU | {"strategy": "ring_flash_attn_llama3", "seq_len": 4096}
        ),
    ]


def crowded():
    """Return records with many ranks and close capacities; every seventh cell has no result."""
    records = [
        complete(record)
        for limit in (4.0, 4.1, 40.0)
        for record in on_ranks(
            [*STRATEGIES.built_in][1:6], LENGTHS, [1, 2, 4, 8], **{"cluster.memory_limit_gib": limit}
        )
    ]
    failures = ("out_of_memory", "timed_out", "unsupported")
    for record, status in zip(records[::7], itertools.cycle(failures), strict=False):
        record.update(FAILED | {"status": status, "reason": "no"})
    return records


SWEEPS = {
    "one cell": lambda: [complete(make_record())],
    "failures among cells": lambda: synthetic_records(30),
    "a CPU": of_each_kind,
    "all at once": crowded,
    "hundreds": lambda: synthetic_records(288),
    "thousands": lambda: synthetic_records(3000),
}
SLOW = {"hundreds", "thousands"}


@pytest.mark.parametrize(
    "sweep", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in SWEEPS]
)
def test_figure_texts_do_not_overlap_and_are_not_cut_off(cells_of, sweep):
    cells = cells_of(SWEEPS[sweep]())
    drawn = {name: built_figure(name, cells).figure for name in figures_for(cells)}
    assert {name: overlaps_in(figure) for name, figure in drawn.items()} == {name: [] for name in drawn}
    assert {name: cut_off_in(figure) for name, figure in drawn.items()} == {name: [] for name in drawn}


def test_inline_svg_has_unique_ids(cells_of, tmp_path):
    svg = write_figure("throughput", select_for_figures(cells_of([make_record()])), tmp_path).svg
    names = re.findall(r'\bid="([^"]*)"', svg)
    assert names
    assert all(each.startswith("throughput-") for each in names)
    assert {*re.findall(r'(?:url\(#|href="#)([^")]*)', svg)} <= {*names}


def test_figures_without_values_are_left_out_except_one(cells_of):
    failed = make_failure("out_of_memory", "no room")
    assert figures_for(cells_of([failed])) == ["throughput"]
    assert figures_for(cells_of([])) == []
    assert "step_parts" not in figures_for(cells_of([make_record(trace=None)]))
    written = texts_of(built_figure("throughput", cells_of([failed])).figure)
    assert {"No cell has a result (1 OOM)", "ulysses: out of memory"} <= {*written}


@pytest.mark.parametrize(("status", "glyph"), [("out_of_memory", "x"), ("timed_out", "*")])
def test_failed_cell_has_a_labelled_mark_at_its_length(cells_of, status, glyph):
    records = [complete(make_record()), make_failure(status, "no", config={"seq_len": 65536})]
    sheet = sheet_of("throughput", cells_of(records))
    strip, axes = sheet.panels
    (mark,) = [line for line in strip.lines if line.get_marker() == glyph]
    assert list(mark.get_xdata()) == [65536]
    assert strip.get_xlim() == axes.get_xlim()
    bottom, top = sorted(strip.get_ylim())
    assert all(bottom < y < top for y in mark.get_ydata())
    assert mark.get_color() == STRATEGIES["ulysses"].style.color
    assert f"ulysses: {status.replace('_', ' ')}" in texts_of(sheet.figure)


def test_failure_marks_are_grouped_by_status_if_too_many(cells_of):
    failing = [16384, 32768, 98304]
    records = [make_failure("out_of_memory", "no", config={"seq_len": each}) for each in failing]
    (mark,) = failure_marks(cells_of([*grid(["local"], LENGTHS), *records]).series)
    assert mark.places == (16384, 32768, 98304)
    many = [make_failure("error", "no", config={"strategy": each}) for each in STRATEGIES.built_in]
    assert len(many) > MAX_ROWS
    (mark,) = failure_marks(cells_of(many).series)
    assert mark.label == "error"


@pytest.mark.parametrize(
    ("config", "banner"), [(CPU, CPU_CAVEAT), (SHARED_GPU, SHARED_GPU_CAVEAT), ({}, None)]
)
def test_figure_heading_has_setup_caveat_and_selection(cells_of, config, banner):
    cells = cells_of([make_record(config=config)])
    written = {*texts_of(draw_figure("throughput", Selection(cells, None)).figure)}
    assert "measured: qwen3_nano, zero3, bf16 on NVIDIA H100 80GB HBM3, 2 ranks" in written
    assert {CPU_CAVEAT, SHARED_GPU_CAVEAT} & written == ({banner} if banner else set())
    part = "Only a part of the series is drawn; all are in summary.csv."
    caveat = " ".join(filter(None, (banner, part)))
    assert caveat in texts_of(draw_figure("throughput", Selection(cells, "24 of 30")).figure)


def test_line_has_a_gap_at_a_failed_length(cells_of):
    records = [*grid(["ulysses"], [8192, 32768]), make_failure("error", "no", config={"seq_len": 16384})]
    line = axes_of("throughput", cells_of(records)).containers[0].lines[0]
    assert [value == value for value in line.get_ydata()] == [True, False, True]  # noqa: PLR0124  NaN


@pytest.mark.parametrize(("lengths", "scale"), [([8192, 32768], "linear"), ([8192, 98304], "log")])
def test_throughput_over_many_lengths_has_a_logarithmic_axis(cells_of, lengths, scale):
    records = on_ranks(["ulysses"], lengths, [2], lambda length, _: length**2 / 1e6)
    axes = axes_of("throughput", cells_of(records))
    assert axes.get_yscale() == scale
    labels = {label.get_text() for label in axes.get_xticklabels()}
    assert {"8k", "96k" if scale == "log" else "32k"} <= labels


def test_second_engine_of_a_strategy_has_hollow_markers(cells_of):
    lines = axes_of(
        "throughput", cells_of([make_record(config={"engine": each}) for each in ("ddp", "zero3")])
    ).lines
    assert [each.get_fillstyle() for each in lines if each.get_marker() == "s"] == ["full", "none"]


def test_built_in_strategies_have_unique_markers():
    styles = [facts.style for facts in STRATEGIES.built_in.values()]
    markers = [style.marker for style in styles]
    assert not [*itertools.chain.from_iterable(style.faults() for style in styles)]
    assert len({*markers, *OTHER_MARKERS}) == len(markers) + len(OTHER_MARKERS)


def test_style_of_unknown_strategy_does_not_depend_on_others():
    alone = styles_of(["something_new"])["something_new"]
    assert styles_of([*STRATEGIES.built_in, "something_new"])["something_new"] == alone


def test_unknown_strategies_have_different_styles():
    styles = styles_of(f"my_ring_{number}" for number in range(len(OTHER_STYLES))).values()
    assert len({style.color_and_marker for style in styles}) == len(OTHER_STYLES)


OWN = PlotStyle("#4B0082", (5, 1, 36), ":")


def test_plug_in_is_drawn_in_its_own_style(monkeypatch, cells_of):
    monkeypatch.setitem(STRATEGIES._loaded, "indigo", SimpleNamespace(style=OWN))
    lines = axes_of("throughput", cells_of(grid(["indigo"], LENGTHS))).lines
    look = (OWN.color, OWN.marker, OWN.line)
    assert look in [(each.get_color(), each.get_marker(), each.get_linestyle()) for each in lines]


RING = STRATEGIES["ring"].style
LIKE_OURS = {
    "no style": None,
    "a style of ours": RING,
    "in small letters": replace(RING, color=RING.color.lower()),
}


@pytest.mark.parametrize("stated", LIKE_OURS.values(), ids=LIKE_OURS)
def test_plug_in_never_looks_like_a_built_in_strategy(monkeypatch, stated):
    by_name = styles_of(["mine"])
    monkeypatch.setitem(STRATEGIES._loaded, "mine", SimpleNamespace(style=stated))
    assert styles_of(["mine"]) == by_name


def test_step_bars_reach_100_percent_within_the_axes(cells_of):
    failed = make_failure("error", "no", config={"seq_len": 2 * LENGTHS[-1]})
    for lengths, *failures in ((LENGTHS, failed), ([8192],)):
        sheet = sheet_of("step_parts", cells_of([*grid(["local", "ulysses"], lengths), *failures]))
        axes = sheet.axes
        labels = dict(zip(axes.get_xticks(), map(Text.get_text, axes.get_xticklabels()), strict=True))
        marks = [labels[place] for line in sheet.panels[0].lines for place in line.get_xdata() if failures]
        assert marks == ["192k"] * len(failures)  # at the place of the bars of its length
        tops = {}
        for bar in axes.patches:
            tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
        assert len(tops) == 2 * len(lengths)
        assert all(top == pytest.approx(1) for top in tops.values())
        left, right = axes.get_xlim()
        assert all(left <= bar.get_x() and bar.get_x() + bar.get_width() <= right for bar in axes.patches)


def test_logarithmic_memory_ticks_are_powers_of_two(cells_of):
    memory = {"peak_allocated_bytes": [3 * 2**20]}, {"peak_allocated_bytes": [5 * 2**30]}
    records = [make_record(config={"seq_len": 8192 * 2**i}, memory=each) for i, each in enumerate(memory)]
    axes = axes_of("peak_memory", cells_of(records))
    assert axes.get_yscale() == "log"
    assert {math.log2(tick) % 1 for tick in axes.get_yticks()} == {0}


def test_linear_memory_ticks_have_labels_of_their_values(cells_of):
    axes = axes_of("peak_memory", cells_of([make_record(memory={"peak_allocated_bytes": [2 * 2**30]})]))
    labels = [axes.yaxis.get_major_formatter()(tick, None) for tick in axes.get_yticks()]
    assert labels[:3] == ["0 GiB", "0.5 GiB", "1 GiB"]
    assert [float(label.removesuffix(" GiB")) * 2**30 for label in labels] == [*axes.get_yticks()]


UNKNOWN = {"purpose_exposed_ms": {"other": [11.0] * 2}, "purpose_exposed_waiting_ms": None}


@pytest.mark.parametrize(
    ("name", "trace_changes", "status"),
    [
        ("attention_communication", {"step_ms": [400.0] * 2}, EXCLUDED),
        ("step_parts", {"step_ms": [400.0] * 2}, EXCLUDED),
        ("attention_communication", {"purposes_unknown": ["no tap"] * 2, **UNKNOWN}, NOT_KNOWN),
        ("communication_share", {"purposes_unknown": ["no tap"] * 2, **UNKNOWN}, NOT_KNOWN),
    ],
)
def test_traced_cell_without_value_is_marked_as_excluded(cells_of, name, trace_changes, status):
    traces = {"ring": make_trace(2), "ulysses": make_trace(2, **trace_changes), "usp": None}
    records = [make_record(config={"strategy": name}, trace=trace) for name, trace in traces.items()]
    sheet = sheet_of(name, cells_of(records))
    assert f"ulysses: {status}" in texts_of(sheet.figure)
    labels = [*legend_entries(sheet)]
    assert not any("usp" in text for text in [*texts_of(sheet.figure), *labels])
    assert name == "step_parts" or labels == ["ring", "waiting for the last rank"]


def bars_of(axes):
    """Return both ends of every error bar of the first series."""
    (bars,) = axes.containers[0].lines[2]
    return [tuple(segment[:, 1]) for segment in bars.get_segments()]


def test_error_bars_are_band_or_interval(cells_of):
    measured = with_prediction(make_record(), step_ms=(10.0, 20.0, 30.0))
    steady = bars_of(axes_of("throughput", cells_of([measured])))
    assert steady == [pytest.approx((81920, 81920))]
    axes = axes_of("throughput", cells_of([make_predicted(step_ms=(80.0, 100.0, 128.0))]))
    assert bars_of(axes) == [pytest.approx((64000, 102400))]
    five_steps = make_record(timing=make_timing([[100.0] * 5] * 2))
    assert not axes_of("throughput", cells_of([five_steps])).containers[0].has_yerr


def test_only_memory_figure_marks_undecided_memory(cells_of):
    cells = cells_of([make_predicted(fit="undecided"), make_predicted(config={"seq_len": 16384})])
    shown = {name: texts_of(sheet_of(name, cells).figure) for name in ("peak_memory", "throughput")}
    label = "ulysses: undecided (predicted)"
    assert label in shown["peak_memory"]
    assert label not in shown["throughput"]
    alone = sheet_of("throughput", cells_of([make_predicted(fit="out_of_memory")]))
    assert "ulysses: OOM (predicted)" in texts_of(alone.figure)


def test_predicted_figure_mentions_no_sample_interval_or_trace(cells_of):
    cells = cells_of([make_predicted()])
    for name in figures_for(cells):
        sheet = built_figure(name, cells)
        written = " ".join([*texts_of(sheet.figure), FIGURES[name].caption_for(cells)])
        assert not [words for words in ("95 % interval", "traced step", "median") if words in written]
        assert "Predicted: " in written
