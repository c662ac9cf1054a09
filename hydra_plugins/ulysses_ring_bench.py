"""Hydra sweeper that runs all cells of a command line as one sweep.

Hydra looks for plugins only in packages named `hydra_plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class CellSweeper(Sweeper):
    """Sweeper that composes all cells, runs them as one sweep and exits with the sweep's exit code."""

    def __init__(self, params: Mapping[str, str] | None) -> None:
        """Take options of every sweep from `hydra.sweeper.params`; the command line follows them."""
        self.defaults = [f"{key}={value}" for key, value in (params or {}).items()]

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002  Hydra's signature
        config: DictConfig,
    ) -> None:
        """Store what `sweep` needs to compose cells; Hydra calls this first."""
        self.loader, self.config = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> Any:
        import run_sweep
        from bench.request.composition import compose_cells, sweep_cell_words

        cells = sweep_cell_words([*self.defaults, *arguments], self.loader)
        run_sweep.run_cells(
            compose_cells(cells, lambda words: self.loader.load_sweep_config(self.config, words)),
            default_strategies=not any(word.startswith("strategy=") for word in arguments),
        )


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="cells",
    node={"_target_": f"{CellSweeper.__module__}.{CellSweeper.__qualname__}", "params": {}},
)
