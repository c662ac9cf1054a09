import pytest

from analysis.cells.derived import with_derived
from analysis.cells.summary import summarise
from analysis.frame.load import to_frame


@pytest.fixture
def summary_of():
    """Records to the summary that tables and figures are made of."""
    return lambda records: with_derived(summarise(to_frame(records, {"h100_80gb": 1e15})))
