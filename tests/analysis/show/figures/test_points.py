"""Hover areas of figures: their places and texts."""

import re

import pytest

from analysis.cells.selection import select_for_figures
from analysis.show.figures.figures import write_figure
from tests.support.drawing import sheet_of
from tests.support.records import grid, make_failure, make_predicted, make_record, make_timing, make_trace


def hover_texts(name, cells):
    return [spot.text for spot in sheet_of(name, cells).hover_areas]


def test_point_text_has_value_interval_samples_and_status(cells_of):
    few = make_record(config={"seq_len": 4096}, timing=make_timing([[100.0] * 2] * 2, 4096))
    cells = cells_of([make_record(), few])
    assert hover_texts("throughput", cells) == [
        "ulysses, 4k: 40,960 tokens/s, n=2, ok",
        "ulysses, 8k: 81,920 tokens/s, 95 % interval 81,920 to 81,920, n=8, ok",
    ]
    assert hover_texts("peak_memory", cells)[1] == "ulysses, 8k: 2.0 GiB, n=8, ok"
    assert (
        hover_texts("attention_communication", cells)[-1] == "ulysses, 8k: 2.7 % waiting, 1 traced step, ok"
    )


def test_predicted_point_text_has_the_band(cells_of):
    (text,) = hover_texts("throughput", cells_of([make_predicted()]))
    assert "tokens/s, band of the model " in text
    assert text.endswith(", fits (predicted)")


@pytest.mark.parametrize("name", ["throughput", "step_parts"])
def test_cell_without_value_has_no_hover_area(cells_of, name):
    failed = make_failure("out_of_memory", "no room", config={"seq_len": 65536})
    assert (
        hover_texts(name, cells_of([make_record(), failed]))
        == hover_texts(name, cells_of([make_record()]))
        != []
    )


def test_step_part_text_has_time_and_share(cells_of):
    assert "ulysses, 8k: optimizer 10.0 ms, 9.1 %" in hover_texts("step_parts", cells_of([make_record()]))


def test_bar_splits_attention_beyond_the_ideal(cells_of):
    local = make_record(config={"strategy": "local"}, trace=make_trace(1, 20.0))
    texts = hover_texts("step_parts", cells_of([local, make_record(trace=make_trace(2, 20.0))]))
    parts = {text.partition(", 8k: ")[::2] for text in texts}
    assert any(name == "local" and part.startswith("attention compute 20.0 ms") for name, part in parts)
    assert any(name == "ulysses" and part.startswith("ideal attention 10.0 ms") for name, part in parts)
    assert any(name == "ulysses" and part.startswith("attention beyond ideal") for name, part in parts)


def test_hover_rectangle_lies_on_its_marker(cells_of, tmp_path):
    cells = cells_of(grid(["ulysses"], [8192, 65536]))
    svg = write_figure("throughput", select_for_figures(cells), tmp_path).svg
    marks = re.findall(r'<use [^>]*href="#[^"]*" x="([\d.]+)" y="([\d.]+)"', svg)
    spots = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" data-text', svg)
    assert len(spots) == 2
    for x, y, width, height in (map(float, spot) for spot in spots):
        middle = (x + width / 2, y + height / 2)
        assert any(middle == pytest.approx((float(a), float(b)), abs=0.2) for a, b in marks)
