"""How many seconds an operation, a kernel call, a message or the host's Python takes on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.config import Cell
from bench.cost.band import End
from bench.extras.predict.hardware_file import SLOWEST, DeviceLink, Hardware
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
"""A kernel call on so few keys runs at half of what long ones sustain. Assumed, after how the causal curves
of arXiv:2307.08691, figure 5, rise from 512 to 16k tokens."""
LAUNCHES_PER_BLOCK = 4
LAUNCHES_PER_COMMUNICATION = 6
"""The call and the copies around it."""
MESSAGES = ("send", "all_to_all")
"""Kinds whose messages leave at once, not step after step."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates of one device, as shares of its peaks, at one end of what is not known of them."""

    hardware: Hardware
    end: End
    """End of the times: the high end has the lowest rates."""

    def knows(self, cell: Cell) -> bool:
        """Return whether there are rates of the cell's kernel."""
        return cell.kernel in self.hardware.attention_forward or STRATEGIES[cell.strategy].is_unfused

    def operation_s(self, operation: Operation) -> float:
        """Return the seconds of one such operation.

        The roofline: the longer of computing and moving (doi:10.1145/1498765.1498785).
        """
        hardware, slowest = self.hardware, SLOWEST[self.end]
        compute_s = operation.flops / (hardware.peak_flops_per_s * hardware.matmul.at(slowest))
        moved_s = operation.moved_bytes / (hardware.memory_bytes_per_s * hardware.memory.at(slowest))
        return max(compute_s, moved_s)

    def block_s(
        self, block: Block, head_dim: int, kernel: str, *, number_bytes: int, backward: bool
    ) -> float:
        """Seconds of one call of a kernel, by the shares of 16 bits; without a kernel, of its operations."""
        if kernel not in self.hardware.attention_forward:
            operations = unfused_block(block, head_dim, number_bytes, backward=backward)
            return sum(each.count * self.operation_s(each) for each in operations)
        shares = self.hardware.attention_backward if backward else self.hardware.attention_forward
        products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
        rate = self.hardware.peak_flops_per_s * shares[kernel].at(SLOWEST[self.end])
        slowdown = 1 + HALF_RATE_KEYS / block.keys if block.keys else 1
        return block_flops(block, head_dim, products) / rate * slowdown

    def communication_s(self, exchange: Communication) -> float:
        """Seconds of one call to the communication library, once all have arrived.

        Latency, and bytes over the slowest link that they cross; nothing where a rank meets no other.
        """
        if exchange.ranks <= 1:
            return 0.0
        inside = min(exchange.span, self.hardware.devices_per_node)
        times = [self._bytes_over_s(self.hardware.node, exchange.sent_bytes)]
        if exchange.span > inside:
            here = max(1, inside // exchange.stride)
            times.append(self._bytes_over_s(self.hardware.network, _bytes_of_card(exchange, here)))
        return self._latency_s(exchange, inside) + max(times)

    def _latency_s(self, exchange: Communication, inside: int) -> float:
        """Of a message, or of a collective's ring: the first step, and a hop each further one.

        Hops from node to node are one fewer than the nodes (NCCL, src/graph/tuning.cc, `nInterSteps`).
        """
        node, network = self.hardware.node, self.hardware.network
        first = network.latency_s if exchange.span > inside else node.latency_s
        if exchange.kind in MESSAGES:
            return first
        hops = exchange.ranks - 2
        between_nodes = min(hops, math.ceil(exchange.span / inside) - 1)
        within = (hops - between_nodes) * node.hop_latency_s
        return first + within + between_nodes * network.hop_latency_s

    def host_s(self, cell: Cell, launches: int) -> float:
        """Return the host's seconds of one step: starting `launches` operations, and the engine's Python."""
        host = ENGINE_FACTS[cell.engine.name].host.get(cell.engine.leaf, NOT_MEASURED)
        layer_ms = host.checkpointed_layer_ms if cell.checkpointing else host.layer_ms
        engine_s = 1e-3 * (cell.grad_accum * cell.model.num_layers * layer_ms + host.step_ms)
        band = self.hardware.host_s_per_operation
        return (launches + engine_s / band.expected) * band.at(self.end)

    def _bytes_over_s(self, link: DeviceLink, sent_bytes: float) -> float:
        return sent_bytes / (link.bytes_per_s * self.hardware.link.at(SLOWEST[self.end]))


def _bytes_of_card(exchange: Communication, here: int) -> float:
    """Bytes that one GPU's network card sends to other nodes; `here` ranks of the exchange share its node.

    Of an all-to-all its rank's part for other nodes; of a message from the last rank of a node all. A
    collective's ring leaves a node once, and NCCL lays a ring through each card (`src/graph/search.cc`).
    """
    if exchange.is_even:
        return exchange.sent_bytes * (exchange.ranks - here) / (exchange.ranks - 1)
    return exchange.sent_bytes if exchange.kind in MESSAGES else exchange.sent_bytes / here
