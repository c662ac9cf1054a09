import pytest

from tests.analysis.predictions import make_predicted, with_prediction
from tests.analysis.records import make_failure, make_record, metrics_of


def test_the_one_step_of_a_prediction_stands_for_all_its_ranks():
    config = {"cluster.world_size": 8, "sp_degree": 8}
    found = metrics_of(make_predicted(config=config))
    assert found.tokens_per_s_per_rank == pytest.approx(found.tokens_per_s / 8)
    assert found.attention_transfer_share == pytest.approx(7 / 100)
    assert found.n_steps is found.traced_steps is found.attention_waiting_share is found.checks is None
    measured = with_prediction(make_record(config=config))
    assert found.mfu_causal == pytest.approx(metrics_of(measured).mfu_causal)


def test_the_slow_end_of_a_step_is_the_low_end_of_its_tokens_per_s():
    found = metrics_of(make_predicted(step_ms=(80.0, 100.0, 125.0)))
    assert found.predicted_tokens_per_s_low == pytest.approx(8192 / 0.125)
    assert found.predicted_tokens_per_s_high == pytest.approx(8192 / 0.080)


def test_a_prediction_outlives_a_cell_that_failed():
    found = metrics_of(with_prediction(make_failure("out_of_memory", "no room"), fit="out_of_memory"))
    assert (found.predicted_fit, found.predicted_step_time_ms) == ("out_of_memory", 100.0)
    assert found.step_time_ms is None


@pytest.mark.parametrize("band", [(2.0, 1.0, 3.0), (1.0, 3.0, 2.0), (0.0, 1.0, 2.0)])
def test_a_band_out_of_order_or_down_to_nothing_is_no_record(band):
    with pytest.raises(ValueError, match="Expected"):
        metrics_of(make_predicted(step_ms=band))
