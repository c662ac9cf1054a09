"""Facts of `local`, which has no sequence parallelism; every rank holds whole sequences."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.facts import ScheduledFacts
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Schedule, Stage, whole_block


class LocalFacts(ScheduledFacts):
    name = "local"
    style = PlotStyle("#000000", "o")
    supports_documents = True
    shares_sequences = False

    def schedule(self, cell: Cell) -> Schedule:
        """Return one block over whole sequences and no communication."""
        whole = Stage((whole_block(cell, cell.model.num_heads, cell.model.num_kv_heads),))
        return Schedule((whole,), (whole,))
