"""What can be pointed at in a figure: where it stands, and what it says."""

from itertools import pairwise

import pytest

from analysis.cells.selection import for_figures
from analysis.figures.drawing import NARROW_INCHES, WIDTH_INCHES, build_figure, spots_of, write_figure
from analysis.figures.figures import FIGURES
from tests.analysis.figures.test_figures import is_cut_off
from tests.analysis.predictions import make_predicted
from tests.analysis.records import grid, make_failure, make_record, make_timing


def said(name, cells):
    return [area.text for area in FIGURES[name].areas(cells)]


def test_a_point_says_its_value_its_interval_its_samples_and_its_status(cells_of):
    few = make_record(config={"seq_len": 4096}, timing=make_timing([[100.0] * 2] * 2, 4096))
    cells = cells_of([make_record(), few])
    assert said("throughput", cells) == [
        "ulysses, 4k: 40,960 tokens/s, n=2, ok",
        "ulysses, 8k: 81,920 tokens/s, 95 % interval 81,920 to 81,920, n=8, ok",
    ]
    assert said("peak_memory", cells)[1] == "ulysses, 8k: 2.0 GiB, n=8, ok"
    assert said("attention_exchange", cells)[-1] == "ulysses, 8k: 2.7 % waiting, 1 traced step, ok"


def test_a_predicted_point_says_the_band_and_what_it_is(cells_of):
    (text,) = said("throughput", cells_of([make_predicted()]))
    assert "tokens/s, band of the model " in text
    assert text.endswith(", fits (predicted)")


@pytest.mark.parametrize("records", [[], [make_record()]])
@pytest.mark.parametrize("name", FIGURES)
def test_a_cell_without_a_value_cannot_be_pointed_at(cells_of, name, records):
    failed = make_failure("out_of_memory", "no room", config={"seq_len": 65536})
    assert said(name, cells_of([*records, failed])) == said(name, cells_of(records))
    assert bool(records) >= bool(said(name, cells_of(records)))


def test_a_figure_without_points_has_nothing_to_point_at(cells_of, tmp_path):
    assert write_figure("throughput", for_figures(cells_of([])), tmp_path).wide.spots == ()


@pytest.mark.parametrize("name", ["step_parts", "waterfall"])
def test_a_part_of_a_step_says_its_time_and_its_share(cells_of, name):
    assert "ulysses, 8k: optimizer 10.0 ms, 9.1 %" in said(name, cells_of([make_record()]))


def test_what_is_pointed_at_stands_where_it_is_drawn(cells_of):
    cells = cells_of(grid(["ulysses"], [8192, 65536]))
    figure = build_figure("throughput", cells)
    figure.draw_without_rendering()
    (line,) = (
        each for each in figure.axes[0].lines if each.get_marker() == "s" and len(each.get_xdata()) == 2
    )
    drawn = figure.axes[0].transData.transform(line.get_xydata()) / figure.dpi * 1000 / WIDTH_INCHES
    high = 1000 * figure.get_size_inches()[1] / WIDTH_INCHES
    spots = spots_of(figure, [*FIGURES["throughput"].areas(cells)])
    middles = [(spot.left + spot.width / 2, spot.top + spot.height / 2) for spot in spots]
    assert middles == [pytest.approx((x, high - y), abs=1.5) for x, y in drawn]


def test_a_narrow_waterfall_names_its_bars_above_them_and_is_pointed_at_where_they_are(cells_of, tmp_path):
    drawn = for_figures(cells_of([make_record()]))
    file = write_figure("waterfall", drawn, tmp_path)
    figure = build_figure("waterfall", drawn.cells, width=NARROW_INCHES)
    assert not is_cut_off(figure)
    assert [spot.text for spot in file.narrow.spots] == [spot.text for spot in file.wide.spots]
    bars = [bar.get_window_extent() for bar in figure.axes[0].patches if bar.get_width() > 0]
    gap = min(upper.y1 - lower.y1 for upper, lower in pairwise(bars))
    assert gap / figure.dpi > 24 / 72  # room for a bar and 8 points of text above it
    scale = 1000 / figure.bbox.width
    tops = [file.narrow.height - bar.y1 * scale for bar in bars]
    assert [spot.top for spot in file.narrow.spots] == [pytest.approx(top, abs=1.5) for top in tops]
