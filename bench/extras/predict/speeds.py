"""Seconds of operations, kernel calls, communication and the host's Python on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.config import Cell
from bench.cost.band import BandEnd
from bench.extras.predict.hardware_file import RATE_END, DeviceLink, Hardware
from bench.extras.predict.operations import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    Operation,
    block_flops,
    unfused_block,
)
from bench.strategies import STRATEGIES
from bench.strategies.schedule import Block, Communication
from bench.training.engines import ENGINE_FACTS
from bench.training.engines.facts import NOT_MEASURED

HALF_RATE_KEYS = 350
"""Number of keys at which a kernel call runs at half the rate of a long call. Assumed, from the rise of the
causal curves in arXiv:2307.08691, figure 5, between 512 and 16k tokens."""
LAUNCHES_PER_BLOCK = 4
"""Operators that Python launches for one kernel call."""
LAUNCHES_PER_COMMUNICATION = 6
"""Operators that Python launches for one communication call and the copies before and after it."""
KINDS_WITHOUT_RING = ("send", "all_to_all")
"""Kinds of communication that send all messages at once. All other kinds send in the steps of a ring."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Time model of one device, for the low, expected or high end of the predicted times."""

    hardware: Hardware
    end: BandEnd
    """End of the band of predicted times; the high end has the lowest rates."""

    def has_rates_of(self, cell: Cell) -> bool:
        """Return whether the hardware has rates of the cell's kernel, or the strategy calls no kernel."""
        return cell.kernel in self.hardware.attention_forward or STRATEGIES[cell.strategy].is_unfused

    def operation_s(self, operation: Operation) -> float:
        """Return the seconds of one operation: the longer of computing and of reading and writing memory.

        This is the roofline model (doi:10.1145/1498765.1498785).
        """
        hardware, rate_end = self.hardware, RATE_END[self.end]
        compute_s = operation.flops / (hardware.peak_flops_per_s * hardware.matmul.value_at(rate_end))
        moved_s = operation.moved_bytes / (hardware.memory_bytes_per_s * hardware.memory.value_at(rate_end))
        return max(compute_s, moved_s)

    def block_s(
        self, block: Block, head_dim: int, kernel: str, *, number_bytes: int, backward: bool
    ) -> float:
        """Return the seconds of one block: a kernel call at 16-bit rates, or operations without a kernel."""
        if kernel not in self.hardware.attention_forward:
            operations = unfused_block(block, head_dim, number_bytes, backward=backward)
            return sum(operation.count * self.operation_s(operation) for operation in operations)
        shares = self.hardware.attention_backward if backward else self.hardware.attention_forward
        products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
        rate = self.hardware.peak_flops_per_s * shares[kernel].value_at(RATE_END[self.end])
        slowdown = 1 + HALF_RATE_KEYS / block.keys if block.keys else 1
        return block_flops(block, head_dim, products) / rate * slowdown

    def communication_s(self, communication: Communication) -> float:
        """Return the seconds of one communication call from the arrival of its last rank.

        They are the latency plus the time of the payload on the slowest link that it crosses. A group of one
        rank takes 0 seconds.
        """
        if communication.ranks <= 1:
            return 0.0
        ranks_inside = min(communication.span, self.hardware.devices_per_node)
        times = [self._bytes_over_s(self.hardware.node, communication.sent_bytes)]
        if communication.span > ranks_inside:
            ranks_per_node = max(1, ranks_inside // communication.stride)
            times.append(
                self._bytes_over_s(self.hardware.network, _network_card_bytes(communication, ranks_per_node))
            )
        return self._latency_s(communication, ranks_inside) + max(times)

    def _latency_s(self, communication: Communication, ranks_inside: int) -> float:
        """Return the latency of a message, or of the steps of a collective's ring.

        A ring of n ranks takes a first step and n - 2 hops. On m nodes, m - 1 of the hops go from node to
        node (NCCL, src/graph/tuning.cc, `nInterSteps`).

        Args:
            communication: Communication call.
            ranks_inside: Number of consecutive ranks that are on one node, whether of the group or not.
        """
        node, network = self.hardware.node, self.hardware.network
        first = network.latency_s if communication.span > ranks_inside else node.latency_s
        if communication.kind in KINDS_WITHOUT_RING:
            return first
        hops = communication.ranks - 2
        between_nodes = min(hops, math.ceil(communication.span / ranks_inside) - 1)
        within = (hops - between_nodes) * node.hop_latency_s
        return first + within + between_nodes * network.hop_latency_s

    def host_s(self, cell: Cell, launches: int) -> float:
        """Return the host's seconds of one step: `launches` operator launches, and the engine's Python."""
        host = ENGINE_FACTS[cell.engine.name].host.get(cell.engine.leaf, NOT_MEASURED)
        layer_ms = host.checkpointed_layer_ms if cell.checkpointing else host.layer_ms
        engine_s = 1e-3 * (cell.grad_accum * cell.model.num_layers * layer_ms + host.step_ms)
        band = self.hardware.host_s_per_operation
        return (launches + engine_s / band.expected) * band.value_at(self.end)

    def _bytes_over_s(self, link: DeviceLink, sent_bytes: float) -> float:
        return sent_bytes / (link.bytes_per_s * self.hardware.link.value_at(RATE_END[self.end]))


def _network_card_bytes(communication: Communication, ranks_per_node: int) -> float:
    """Return the bytes that the network card of one GPU sends to other nodes.

    In an all-to-all a card sends the part of its rank's payload that is for other nodes. In a send
    the whole payload of a node's last rank leaves by one card. A collective's ring leaves a node once, and
    NCCL lays one ring through every card (`src/graph/search.cc`), so the cards share the payload.

    Args:
        communication: Communication call.
        ranks_per_node: Number of the group's ranks on one node.
    """
    if communication.is_even:
        return communication.sent_bytes * (communication.ranks - ranks_per_node) / (communication.ranks - 1)
    return (
        communication.sent_bytes
        if communication.kind in KINDS_WITHOUT_RING
        else communication.sent_bytes / ranks_per_node
    )
