import pytest

from analysis.comparison import with_speed_up
from analysis.ideal import with_ideal_attention
from analysis.load import to_frame
from analysis.summary import summarise


@pytest.fixture
def summary_of():
    """Records to the summary that tables and figures are made of."""
    return lambda records: with_ideal_attention(
        with_speed_up(summarise(to_frame(records, {"h100_80gb": 1e15})))
    )
