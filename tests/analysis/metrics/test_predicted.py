import pytest

from tests.analysis.predictions import make_predicted, with_prediction
from tests.analysis.records import make_failure, metrics_of


def test_a_prediction_outlives_a_cell_that_failed():
    found = metrics_of(with_prediction(make_failure("out_of_memory", "no room"), fit="out_of_memory"))
    assert (found.predicted_fit, found.predicted_step_time_ms) == ("out_of_memory", 100.0)
    assert found.step_time_ms is None


@pytest.mark.parametrize("band", [(2.0, 1.0, 3.0), (1.0, 3.0, 2.0), (0.0, 1.0, 2.0)])
def test_a_band_out_of_order_or_down_to_nothing_is_no_record(band):
    with pytest.raises(ValueError, match="Expected"):
        metrics_of(make_predicted(step_ms=band))
