"""No sequence parallelism: every rank holds whole sequences."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import Facts


class Local(Facts):
    name = "local"
    packs = True
    shares_sequences = False

    def exchange_bytes(self, cell: RunConfig) -> int:  # noqa: ARG002
        """Nothing: attention never leaves the rank."""
        return 0
