import functools
import json

import pytest

from analysis.cells.cells import Cells
from tests.support.records import frame_of_records


@pytest.fixture
def without_figures(monkeypatch):
    """Reports without drawings, which take seconds, for tests that read sentences; others draw them all."""
    monkeypatch.setattr("analysis.report.draw_figures", lambda *_: [])


@pytest.fixture(scope="session")
def cells_of(tmp_path_factory):
    """Records to the cells that tables, figures and sentences are made of; equal records are read once."""

    @functools.cache
    def read(lines):
        records = [json.loads(line) for line in lines]
        return Cells.of_records(frame_of_records(tmp_path_factory.mktemp("sweeps"), records))

    return lambda records: read(tuple(map(json.dumps, records)))


@pytest.fixture
def summary_of(cells_of):
    """Records to the frame of their cells."""
    return lambda records: cells_of(records).frame.copy()
