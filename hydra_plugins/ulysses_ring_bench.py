"""Our sweep as Hydra's launcher, which is handed all cells of a sweep in one call, and its sweeper.

Hydra looks for plugins in a package of this name and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SweepLauncher(Launcher):
    """Composes every cell and hands them all over at once; ends the process with the sweep's exit code."""

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002  Hydra's signature
        config: DictConfig,
    ) -> None:
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:  # noqa: ARG002
        from ulysses_ring_bench.own_modules import own_module

        run_cells = own_module("run_sweep").run_cells
        composed_cells = own_module("bench.request.composition").composed_cells
        words = self.config.hydra.overrides.task
        run_cells(
            composed_cells(
                job_overrides, lambda chosen: self.loader.load_sweep_config(self.config, [*chosen])
            ),
            default_strategies=not any(word.startswith("strategy=") for word in words),
        )


class GridSweeper(BasicSweeper):
    """Hydra's own, which would compose every cell twice: a tenth of a second each."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `SweepLauncher` composes all cells in this process before any runs."""


def _target(plugin: type) -> str:
    return f"{plugin.__module__}.{plugin.__qualname__}"


_store = ConfigStore.instance().store
_store(group="hydra/launcher", name="sweep", node={"_target_": _target(SweepLauncher)})
_store(
    group="hydra/sweeper",
    name="grid",
    node={"_target_": _target(GridSweeper), "max_batch_size": None, "params": {}},
)
