import pytest

from analysis.cells.derived import with_derived
from analysis.cells.summary import summarise
from tests.analysis.records import frame_of_records


@pytest.fixture
def summary_of(tmp_path_factory):
    """Records to the summary that tables and figures are made of."""

    def summary_of(records):
        return with_derived(summarise(frame_of_records(tmp_path_factory.mktemp("sweeps"), records)))

    return summary_of
