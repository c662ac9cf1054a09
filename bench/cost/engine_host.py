"""Host time that an engine's Python adds to a step: hooks around layers, and bookkeeping once a step.

Milliseconds beyond those of torch's operators, at the host speed that files of conf/hardware/ expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bench.config import RunConfig


class EngineHost(NamedTuple):
    """Measured host time of one engine."""

    layer_ms: float
    """Forward and backward of one layer in one micro-step."""
    checkpointed_layer_ms: float
    """Forward and backward of one layer whose forward backward computes again."""
    step_ms: float
    """Work once a step, whatever the number of layers."""


ENGINE_HOST: Mapping[tuple[str, str], EngineHost] = {
    # One H100, one rank (results/reference/h100): slope and intercept of steps of 1 and 28 layers, less 8 us
    # for each operator. Gradients were reduced in smaller buckets than DeepSpeed's default, with which a CPU
    # rank took a fifth less.
    ("zero3", "none"): EngineHost(25, 36, 53),
    # One CPU rank, 14 layers of width 320, less the same model without an engine: 8.1 and 7.7 ms where
    # leaf=none took 12.2 and 13.2, and so that share of the H100's. The time of a step is that of leaf=none.
    ("zero3", "layer"): EngineHost(17, 21, 53),
    # The same CPU rank, 3.3 and 3.5 ms. The time of a step is that of one layer on the H100 (cold, n=2).
    ("fsdp2", "none"): EngineHost(7, 10, 18),
}
"""Host time by engine and leaf module. That of DDP was not measured and counts as nothing."""
NOT_MEASURED = EngineHost(0, 0, 0)


def engine_host_s(cell: RunConfig) -> float:
    """Return the seconds of one step that the engine's Python takes on an expected host."""
    host = ENGINE_HOST.get((cell.engine.name, cell.engine.leaf), NOT_MEASURED)
    layer_ms = host.checkpointed_layer_ms if cell.checkpointing else host.layer_ms
    return 1e-3 * (cell.grad_accum * cell.model.num_layers * layer_ms + host.step_ms)
