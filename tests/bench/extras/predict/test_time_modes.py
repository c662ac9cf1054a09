"""Time of a replayed step on the link, by purpose."""

import pytest

from bench.cost.band import Band, BandEnd
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time_modes import link_ms
from bench.run.cell.outcome import rate_with_link
from bench.strategies.schedule import Communication
from bench.training.messages import Messages

H100 = hardware_of("h100_80gb")
GATHER = Messages("parameters", Communication("all_gather", 2**30, 4), 3)


def communication_ms(kind, size, end=BandEnd.EXPECTED):
    return 1e3 * Speeds(H100, end).communication_s(Communication(kind, size, 4))


def test_link_ms_sums_calls_by_purpose():
    found = link_ms([GATHER, Messages("attention", Communication("all_to_all", 2**20, 4))], H100)
    assert found["parameters"].expected == pytest.approx(3 * communication_ms("all_gather", 2**30))
    assert found["attention"].expected == pytest.approx(communication_ms("all_to_all", 2**20))
    assert found["parameters"].high == pytest.approx(3 * communication_ms("all_gather", 2**30, BandEnd.HIGH))
    assert found["parameters"].low < found["parameters"].expected < found["parameters"].high


def test_link_ms_counts_the_longer_of_send_and_receive():
    sent, received = (
        Messages("attention", Communication(kind, size, 4)) for kind, size in (("send", 9), ("recv", 2**28))
    )
    assert link_ms([sent, received], H100)["attention"].expected == pytest.approx(
        communication_ms("send", 2**28)
    )


def test_rate_with_link_is_none_for_an_unknown_link():
    assert rate_with_link(100.0, 1000, {}) == pytest.approx(100.0)
    assert rate_with_link(100.0, 1000, {"attention": Band(0.0, 1.0, 10_000.0)}) == pytest.approx(50.0)
    assert rate_with_link(100.0, 1000, None) is None
