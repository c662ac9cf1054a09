import pytest

from analysis.derived import with_derived
from analysis.load import to_frame
from analysis.summary import summarise


@pytest.fixture
def summary_of():
    """Records to the summary that tables and figures are made of."""
    return lambda records: with_derived(summarise(to_frame(records, {"h100_80gb": 1e15})))
