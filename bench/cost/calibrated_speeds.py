"""Seconds as they were measured on a machine: `python -m bench.calibrate` writes the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.config import RunConfig
from bench.cost.band import Corner, End
from bench.cost.calibration import CAUSAL_EXPONENT, Calibration
from bench.cost.hardware import Hardware
from bench.cost.operations import Operation
from bench.cost.speeds import DatasheetSpeeds

if TYPE_CHECKING:
    from bench.strategies.schedule import Block, Exchange

DTYPE_OF_BYTES = {2: "bf16", 4: "fp32"}
ANY_DTYPE = "any"
FRESH_MEMORY = "fresh_memory"
CHUNKS, UPDATE, PLAIN = "chunks", "update", "plain"
OVERHEADS = ("layers", "checkpointed_layers", CHUNKS)


@dataclass(frozen=True, slots=True)
class CalibratedSpeeds:
    """Times between those of the tables."""

    calibration: Calibration
    ends: Corner

    def knows(self, cell: RunConfig) -> bool:
        """Whether the cell's dtype, kernel and engine were measured."""
        dtype = cell.dtype
        names = ("product", "norm", f"{cell.kernel}_causal_forward", f"{cell.engine.name}_update")
        return all(self.calibration.has(name, dtype) for name in names)

    def operation_s(self, operation: Operation) -> float:
        name, dtype = operation.kind, DTYPE_OF_BYTES[operation.number_bytes]
        if name == FRESH_MEMORY:
            return operation.rows * self._fresh_byte_s
        engine, _, rest = name.partition("_")
        if rest in OVERHEADS:
            base = f"{PLAIN}_layers" if rest != CHUNKS else f"{engine}_layers"
            own = operation.rows if rest != CHUNKS else 1
            return max(0.0, self._line_s(name, dtype, operation.rows) - self._line_s(base, dtype, own))
        return self._s(name, dtype, sizes_of(operation))

    def block_s(
        self, block: Block, head_dim: int, kernel: str, *, number_bytes: int, backward: bool
    ) -> float:
        """One head after the other; a causal block with more keys than queries is square and rectangle."""
        dtype = DTYPE_OF_BYTES[number_bytes]
        direction = "backward" if backward else "forward"
        square = min(block.queries, block.keys) if block.is_causal else 0
        beside = block.keys - square if block.is_causal else block.keys
        one_s = 0.0
        if square:
            one_s += self._s(f"{kernel}_causal_{direction}", dtype, (head_dim, square), CAUSAL_EXPONENT)
        if beside:
            one_s += self._s(f"{kernel}_full_{direction}", dtype, (head_dim, block.queries, beside))
        heads = block.sequences * block.heads
        return heads * one_s + self._repeat_s(block, head_dim, dtype, backward=backward)

    def exchange_s(self, exchange: Exchange, number_bytes: int) -> float:
        return self._message_s(exchange.kind, exchange.sent_bytes, number_bytes)

    def state_message_s(self, exchange: Exchange, number_bytes: int) -> float:
        """Hooks were timed with their messages, which were smaller than any that is in the tables."""
        took_s = self._message_s(exchange.kind, exchange.sent_bytes, number_bytes)
        return max(0.0, took_s - self._message_s(exchange.kind, 0, number_bytes))

    def host_s(self, launches: int, engine_s: float) -> float:  # noqa: ARG002  what was measured has it inside
        return 0.0

    def _message_s(self, kind: str, sent_bytes: int, number_bytes: int) -> float:
        dtype = DTYPE_OF_BYTES[number_bytes]
        dtype = dtype if self.calibration.has(kind, dtype) else ANY_DTYPE
        return self.calibration.time(kind, dtype, (sent_bytes,)).at(self.ends.links)

    @property
    def hidden_share(self) -> float:
        """What both at once take less than one after the other, over the shorter of the two."""
        dtypes = [dtype for name, dtype in self.calibration.tables if name == "hidden_both"]
        if not dtypes:
            return 0.0
        alone = [self._hidden(name, dtypes[0]) for name in ("hidden_message", "hidden_kernel")]
        saved = sum(alone) - self._hidden("hidden_both", dtypes[0])
        return min(1.0, max(0.0, saved / min(alone)))

    @property
    def _fresh_byte_s(self) -> float:
        """What the first write of a byte takes beyond any other; nothing where it was not measured."""
        if not self.calibration.has(FRESH_MEMORY, ANY_DTYPE):
            return 0.0
        size = self.calibration.tables[FRESH_MEMORY, ANY_DTYPE].axis[0]
        first, other = (self._s(name, ANY_DTYPE, (size,)) for name in (FRESH_MEMORY, "used_memory"))
        return max(0.0, first - other) / size

    def _hidden(self, name: str, dtype: str) -> float:
        table = self.calibration.tables[name, dtype]
        return table.time((table.axis[0],)).expected

    def _repeat_s(self, block: Block, head_dim: int, dtype: str, *, backward: bool) -> float:
        """K and V repeated for a kernel that takes equal numbers of heads, and their gradients summed."""
        if block.heads == block.kv_heads or not self.calibration.has("repeat", dtype):
            return 0.0
        sizes = (head_dim, block.sequences * block.heads * block.keys)
        names = ("repeat", "repeat_backward") if backward else ("repeat",)
        return sum(2 * self._s(name, dtype, sizes) for name in names)

    def _line_s(self, name: str, dtype: str, size: int) -> float:
        """A straight line through what the fewest and the most took."""
        table = self.calibration.tables[name, dtype]
        few, most = table.axis[0], table.axis[-1]
        times = [table.time((each,)).at(self.ends.compute) for each in (few, most)]
        return times[0] + (times[1] - times[0]) * (size - few) / (most - few)

    def _s(self, name: str, dtype: str, sizes: tuple[float, ...], exponent: float = 1.0) -> float:
        return self.calibration.time(name, dtype, sizes, exponent).at(self.ends.compute)


Speeds = DatasheetSpeeds | CalibratedSpeeds


def sizes_of(operation: Operation) -> tuple[float, ...]:
    """In the tables' order: of products rows, columns, inner, of updates tensors, numbers of each."""
    if operation.kind.startswith("product"):
        return operation.rows, operation.columns, operation.inner
    if operation.kind.endswith(UPDATE):
        return operation.rows, operation.columns
    return operation.columns, operation.rows


def speeds_of(hardware: Hardware, end: End, links: End | None = None, host: End | None = None) -> Speeds:
    """What was measured there, if anything was, else shares of a datasheet.

    `end` is that of computing, and of links and host where they have none of their own.
    """
    ends = Corner(end, links or end, host or end)
    if hardware.calibration is not None:
        return CalibratedSpeeds(hardware.calibration, ends)
    return DatasheetSpeeds(hardware, ends)
