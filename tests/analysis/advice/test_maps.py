"""Who leads at which length and link, and how long a sequence may get."""

from dataclasses import replace

import pytest

from analysis.advice.maps import LINKS, Leader, leader, one_of_each_degree, reaches, with_link
from analysis.advice.option import forecast
from bench.cost.fit import Fit
from bench.request.legality import refusal
from tests.analysis.advice.asked import QUESTION, asked


def test_a_slow_link_has_another_leader_than_a_fast_one(advice):
    one_link = with_link(advice.hardware, 1e9)
    assert one_link.node.bytes_per_s == one_link.network.bytes_per_s == 1e9
    cells = advice._at(2**14)
    slow, fast = (lead(advice, cells, rate) for rate in (12.5e9, 900e9))
    assert (slow.strategy, slow.level) == ("local", ("local",))
    assert {*fast.level} == {"local", "ulysses", "ring"}
    assert lead(advice, advice._at(2**20), 900e9) == Leader(2**20, 900e9, None, ())


def lead(advice, cells, bytes_per_s):
    hardware = with_link(advice.hardware, bytes_per_s)
    options = [forecast(cell, refusal(cell), hardware, advice._usable(cell)) for cell in cells]
    return leader(cells[0].seq_len, bytes_per_s, options)


def test_reach_is_the_longest_length_that_fits(advice):
    cell = next(cell for cell in advice._at(2**17) if cell.strategy == "ring" and cell.sp_degree == 8)
    (reach,) = reaches([cell], advice._fit)
    assert advice._fit(replace(cell, seq_len=reach.surely)) is Fit.FITS
    assert advice._fit(replace(cell, seq_len=reach.surely + 1024)) is not Fit.FITS
    assert 2**19 < reach.surely <= reach.perhaps < 2**20
    assert len(one_of_each_degree(advice._at(2**17))) == 1 + 3 + 3 + 2  # local, ulysses, ring, usp


@pytest.mark.slow
def test_figures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.advise.MAP_LENGTHS", (2**13, 2**20))
    monkeypatch.setattr("analysis.advise.LINKS", LINKS[:1])
    advice = asked(*QUESTION, "sp_degree=8")
    (line,) = advice.figures(tmp_path / "figures")
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert files == {"crossover.png", "crossover.svg", "longest.png", "longest.svg"}
    svg = (tmp_path / "figures" / "longest.svg").read_text()
    assert ">ring sp 8</text>" in svg
    assert "crossover.png" in line
