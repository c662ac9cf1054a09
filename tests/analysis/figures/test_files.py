import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from analysis.cells.selection import for_figures
from analysis.figures.files import figure_writer
from analysis.tables.csv_file import forked_with
from tests.analysis.records import grid

NAMES = ["throughput", "waterfall"]


@pytest.fixture
def drawn(cells_of, monkeypatch):
    monkeypatch.setattr("analysis.figures.figures.figures_for", lambda _: NAMES)
    return for_figures(cells_of(grid(["ulysses", "ring"], [8192, 16384])))


def written_in(folder):
    """When each figure's last file was written, by name."""
    return {path.stem: path.stat().st_mtime_ns for path in folder.glob("*.svg")}


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_figures_keep_their_order_whoever_draws_them(drawn, tmp_path):
    alone = figure_writer(drawn, tmp_path)()
    with forked_with(drawn.cells.frame) as other:
        assert figure_writer(drawn, tmp_path, other=other)() == alone
    assert [figure.title for figure in alone] == ["Throughput", "From attention to the step"]


def test_while_the_other_is_busy_this_one_draws_all_that_it_was_not_sent(drawn, tmp_path):
    release = threading.Event()
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as this:
        other.submit(release.wait, 60)
        shared = this.submit(figure_writer(drawn, tmp_path, other=other))
        wait_for(lambda: written_in(tmp_path).keys() == {"waterfall"})
        assert not shared.done()
        release.set()
        assert len(shared.result()) == len(NAMES)
    assert written_in(tmp_path).keys() == {*NAMES}


def test_what_the_other_drew_is_not_drawn_again(drawn, tmp_path):
    with ThreadPoolExecutor(1) as other:
        write = figure_writer(drawn, tmp_path, other=other)
        wait_for(lambda: written_in(tmp_path).keys() == {*NAMES})
        before = written_in(tmp_path)
        assert len(write()) == len(NAMES)
        assert written_in(tmp_path) == before


def test_the_error_of_a_figure_that_the_other_cannot_write_names_its_file(drawn, tmp_path):
    blocked = tmp_path / "throughput.png"
    blocked.mkdir()
    with forked_with(drawn.cells.frame) as other, pytest.raises(IsADirectoryError) as raised:
        figure_writer(drawn, tmp_path, other=other)()
    assert raised.value.filename == str(blocked)
