import functools
import json

import pytest

from analysis.cells.cells import Cells
from tests.support.records import frame_of_records


@pytest.fixture
def without_figures(monkeypatch):
    """Leave out the figures of reports, which take seconds, in tests that read sentences."""
    monkeypatch.setattr("analysis.report.draw_figures", lambda *_: [])


@pytest.fixture(scope="session")
def cells_of(tmp_path_factory):
    """Function from records to their cells; equal records are read once."""

    @functools.cache
    def read(lines):
        records = [json.loads(line) for line in lines]
        return Cells.of_records(frame_of_records(tmp_path_factory.mktemp("sweeps"), records))

    return lambda records: read(tuple(map(json.dumps, records)))


@pytest.fixture
def summary_of(cells_of):
    """Function from records to the frame of their cells."""
    return lambda records: cells_of(records).frame.copy()
