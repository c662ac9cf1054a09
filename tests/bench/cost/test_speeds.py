"""What an exchange takes beside its bytes: one start, and of a ring's further steps a hop each."""

import pytest

from bench.cost.band import End
from bench.cost.speeds import DatasheetSpeeds
from bench.request.hardware import hardware_of
from bench.strategies.schedule import Exchange

H100 = DatasheetSpeeds(hardware_of("h100_80gb"), End.EXPECTED)
NODE, NETWORK = H100.hardware.node, H100.hardware.network


@pytest.mark.parametrize(
    ("exchange", "latency_s"),
    [
        (Exchange("send", 0, 8), NODE.latency_s),
        (Exchange("all_to_all", 0, 8), NODE.latency_s),
        (Exchange("send", 0, 2, stride=8), NETWORK.latency_s),
        (Exchange("all_gather", 0, 2), NODE.latency_s),
        (Exchange("all_gather", 0, 8), NODE.latency_s + 6 * NODE.hop_latency_s),
        (
            Exchange("reduce_scatter", 0, 16),
            NETWORK.latency_s + 13 * NODE.hop_latency_s + NETWORK.hop_latency_s,
        ),
        (Exchange("all_gather", 0, 4, stride=8), NETWORK.latency_s + 2 * NETWORK.hop_latency_s),
    ],
)
def test_a_collective_starts_once_and_hops_from_rank_to_rank(exchange, latency_s):
    assert H100.exchange_s(exchange, 2) == pytest.approx(latency_s)
