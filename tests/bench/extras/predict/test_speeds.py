"""What an exchange takes beside its bytes: one start, and of a ring's further steps a hop each."""

from dataclasses import replace

import pytest

from bench.cost.band import End
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.speeds import Speeds
from bench.strategies.schedule import Communication

H100 = Speeds(hardware_of("h100_80gb"), End.EXPECTED)
NODE, NETWORK = H100.hardware.node, H100.hardware.network


@pytest.mark.parametrize(
    ("exchange", "latency_s"),
    [
        (Communication("all_reduce", 0, 1), 0.0),
        (Communication("send", 0, 1, stride=16), 0.0),
        (Communication("send", 0, 8), NODE.latency_s),
        (Communication("all_to_all", 0, 8), NODE.latency_s),
        (Communication("send", 0, 2, stride=8), NETWORK.latency_s),
        (Communication("all_gather", 0, 2), NODE.latency_s),
        (Communication("all_gather", 0, 8), NODE.latency_s + 6 * NODE.hop_latency_s),
        (
            Communication("reduce_scatter", 0, 16),
            NETWORK.latency_s + 13 * NODE.hop_latency_s + NETWORK.hop_latency_s,
        ),
        (Communication("all_gather", 0, 4, stride=8), NETWORK.latency_s + 2 * NETWORK.hop_latency_s),
    ],
)
def test_a_collective_starts_once_and_hops_from_rank_to_rank(exchange, latency_s):
    assert H100.communication_s(exchange) == pytest.approx(latency_s)


@pytest.mark.parametrize(
    ("exchange", "cards"),
    [
        (Communication("all_gather", 1 << 30, 16), 8),
        (Communication("reduce_scatter", 1 << 30, 32), 8),
        (Communication("all_reduce", 1 << 30, 4, stride=4), 2),
        (Communication("all_gather", 1 << 30, 4, stride=8), 1),
        (Communication("send", 1 << 30, 16), 1),
    ],
)
def test_the_network_cards_of_a_node_share_what_a_collectives_ring_sends_on(exchange, cards):
    """A message from rank to rank leaves by one."""
    rate = NETWORK.bytes_per_s * H100.hardware.link.at(End.EXPECTED)
    sent_s = H100.communication_s(exchange) - H100.communication_s(replace(exchange, sent_bytes=0))
    assert sent_s == pytest.approx((1 << 30) / cards / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("exchange", "elsewhere"),
    [
        (Communication("all_to_all", 1 << 30, 16), 8 / 15),
        (Communication("all_to_all", 1 << 30, 2, stride=8), 1),
        (Communication("all_to_all", 1 << 30, 4, stride=4), 2 / 3),
        (Communication("all_to_all", 1 << 30, 16, to_next=True), 1),
    ],
)
def test_an_all_to_all_sends_over_the_network_what_is_for_ranks_of_other_nodes(exchange, elsewhere):
    """Eight GPUs a node; a rank's own part is not sent."""
    rate = NETWORK.bytes_per_s * H100.hardware.link.at(End.EXPECTED)
    assert H100.communication_s(exchange) == pytest.approx(
        NETWORK.latency_s + elsewhere * (1 << 30) / rate, rel=1e-6
    )
