"""How long the messages of a replayed step take on the link."""

import pytest

from bench.cost.band import Band, End
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time_modes import link_ms
from bench.run.cell.outcome import rate_with_link
from bench.strategies.schedule import Communication
from bench.training.messages import Messages

H100 = hardware_of("h100_80gb")
GATHER = Messages("parameters", Communication("all_gather", 2**30, 4), 3)


def exchange_ms(kind, size, end=End.EXPECTED):
    return 1e3 * Speeds(H100, end).communication_s(Communication(kind, size, 4))


def test_equal_calls_count_one_by_one_and_purposes_stand_apart():
    found = link_ms([GATHER, Messages("attention", Communication("all_to_all", 2**20, 4))], H100)
    assert found["parameters"].expected == pytest.approx(3 * exchange_ms("all_gather", 2**30))
    assert found["attention"].expected == pytest.approx(exchange_ms("all_to_all", 2**20))
    assert found["parameters"].high == pytest.approx(3 * exchange_ms("all_gather", 2**30, End.HIGH))
    assert found["parameters"].low < found["parameters"].expected < found["parameters"].high


def test_of_what_a_rank_sends_and_receives_the_longer_counts():
    sent, received = (
        Messages("attention", Communication(kind, size, 4)) for kind, size in (("send", 9), ("recv", 2**28))
    )
    assert link_ms([sent, received], H100)["attention"].expected == pytest.approx(exchange_ms("send", 2**28))


def test_a_link_that_needs_no_time_leaves_the_rate_and_one_that_is_unknown_gives_none():
    assert rate_with_link(100.0, 1000, {}) == pytest.approx(100.0)
    assert rate_with_link(100.0, 1000, {"attention": Band(0.0, 1.0, 10_000.0)}) == pytest.approx(50.0)
    assert rate_with_link(100.0, 1000, None) is None
