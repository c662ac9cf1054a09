"""What can be pointed at in a figure: where it stands, and what it says."""

import re

import pytest

from analysis.cells.selection import for_figures
from analysis.show.figures.figures import write_figure
from tests.support.drawing import sheet_of
from tests.support.records import grid, make_failure, make_predicted, make_record, make_timing, make_trace


def said(name, cells):
    return [spot.text for spot in sheet_of(name, cells).spots]


def test_a_point_says_its_value_its_interval_its_samples_and_its_status(cells_of):
    few = make_record(config={"seq_len": 4096}, timing=make_timing([[100.0] * 2] * 2, 4096))
    cells = cells_of([make_record(), few])
    assert said("throughput", cells) == [
        "ulysses, 4k: 40,960 tokens/s, n=2, ok",
        "ulysses, 8k: 81,920 tokens/s, 95 % interval 81,920 to 81,920, n=8, ok",
    ]
    assert said("peak_memory", cells)[1] == "ulysses, 8k: 2.0 GiB, n=8, ok"
    assert said("attention_communication", cells)[-1] == "ulysses, 8k: 2.7 % waiting, 1 traced step, ok"


def test_a_predicted_point_says_the_band_and_what_it_is(cells_of):
    (text,) = said("throughput", cells_of([make_predicted()]))
    assert "tokens/s, band of the model " in text
    assert text.endswith(", fits (predicted)")


@pytest.mark.parametrize("name", ["throughput", "step_parts"])
def test_a_cell_without_a_value_cannot_be_pointed_at(cells_of, name):
    failed = make_failure("out_of_memory", "no room", config={"seq_len": 65536})
    assert said(name, cells_of([make_record(), failed])) == said(name, cells_of([make_record()])) != []


def test_a_part_of_a_step_says_its_time_and_its_share(cells_of):
    assert "ulysses, 8k: optimizer 10.0 ms, 9.1 %" in said("step_parts", cells_of([make_record()]))


def test_a_bar_tells_ideal_attention_from_what_is_beyond_it_where_a_cell_took_longer(cells_of):
    local = make_record(config={"strategy": "local"}, trace=make_trace(1, 20.0))
    texts = said("step_parts", cells_of([local, make_record(trace=make_trace(2, 20.0))]))
    parts = {text.partition(", 8k: ")[::2] for text in texts}
    assert any(name == "local" and part.startswith("attention compute 20.0 ms") for name, part in parts)
    assert any(name == "ulysses" and part.startswith("ideal attention 10.0 ms") for name, part in parts)
    assert any(name == "ulysses" and part.startswith("attention beyond ideal") for name, part in parts)


def test_what_is_pointed_at_stands_where_it_is_drawn(cells_of, tmp_path):
    cells = cells_of(grid(["ulysses"], [8192, 65536]))
    svg = write_figure("throughput", for_figures(cells), tmp_path).svg
    marks = re.findall(r'<use [^>]*href="#[^"]*" x="([\d.]+)" y="([\d.]+)"', svg)
    spots = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" data-say', svg)
    assert len(spots) == 2
    for x, y, width, height in (map(float, spot) for spot in spots):
        middle = (x + width / 2, y + height / 2)
        assert any(middle == pytest.approx((float(a), float(b)), abs=0.2) for a, b in marks)
