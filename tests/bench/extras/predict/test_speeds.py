"""Seconds of communication: latency of messages and rings, and bytes over the network cards."""

from dataclasses import replace

import pytest

from bench.cost.band import BandEnd
from bench.extras.predict.hardware_file import hardware_of
from bench.extras.predict.speeds import Speeds
from bench.strategies.schedule import Communication

H100 = Speeds(hardware_of("h100_80gb"), BandEnd.EXPECTED)
NODE, NETWORK = H100.hardware.node, H100.hardware.network


@pytest.mark.parametrize(
    ("communication", "latency_s"),
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
def test_ring_latency_is_a_first_step_and_hops(communication, latency_s):
    assert H100.communication_s(communication) == pytest.approx(latency_s)


@pytest.mark.parametrize(
    ("communication", "cards"),
    [
        (Communication("all_gather", 1 << 30, 16), 8),
        (Communication("reduce_scatter", 1 << 30, 32), 8),
        (Communication("all_reduce", 1 << 30, 4, stride=4), 2),
        (Communication("all_gather", 1 << 30, 4, stride=8), 1),
        (Communication("send", 1 << 30, 16), 1),
    ],
)
def test_network_cards_of_a_node_share_the_bytes_of_a_ring(communication, cards):
    """A message from rank to rank leaves by one card."""
    rate = NETWORK.bytes_per_s * H100.hardware.link.value_at(BandEnd.EXPECTED)
    sent_s = H100.communication_s(communication) - H100.communication_s(replace(communication, sent_bytes=0))
    assert sent_s == pytest.approx((1 << 30) / cards / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("communication", "remote_share"),
    [
        (Communication("all_to_all", 1 << 30, 16), 8 / 15),
        (Communication("all_to_all", 1 << 30, 2, stride=8), 1),
        (Communication("all_to_all", 1 << 30, 4, stride=4), 2 / 3),
        (Communication("all_to_all", 1 << 30, 16, to_next=True), 1),
    ],
)
def test_all_to_all_crosses_the_network_for_other_nodes_only(communication, remote_share):
    """A node has eight GPUs; a rank sends nothing to itself."""
    rate = NETWORK.bytes_per_s * H100.hardware.link.value_at(BandEnd.EXPECTED)
    assert H100.communication_s(communication) == pytest.approx(
        NETWORK.latency_s + remote_share * (1 << 30) / rate, rel=1e-6
    )
