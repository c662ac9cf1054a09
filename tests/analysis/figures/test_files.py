import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from analysis.cells.selection import for_figures
from analysis.figures.files import figure_writer
from tests.analysis.records import grid


@pytest.fixture
def drawn(cells_of, monkeypatch):
    monkeypatch.setattr("analysis.figures.figures.figures_for", lambda _: ["throughput", "waterfall"])
    return for_figures(cells_of(grid(["ulysses", "ring"], [8192, 16384])))


def test_whoever_is_free_draws_and_figures_keep_their_order(drawn, tmp_path):
    alone = figure_writer(drawn, tmp_path)()
    release = threading.Event()
    with ThreadPoolExecutor(1) as other:
        busy = other.submit(release.wait, 60)
        here = figure_writer(drawn, tmp_path, other=other)()
        assert not busy.done()
        release.set()
        there = figure_writer(drawn, tmp_path, other=other)
        other.submit(int).result()  # after all of them
        written = (tmp_path / "throughput.png").stat().st_mtime_ns
        assert there() == here == alone
        assert (tmp_path / "throughput.png").stat().st_mtime_ns == written
    assert [figure.title for figure in alone] == ["Throughput", "From attention to the step"]
