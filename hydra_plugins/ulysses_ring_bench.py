"""Our sweep as Hydra's launcher, because a launcher is handed all cells of a sweep in one call.

Hydra looks for plugins in a package of this name and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        from run_sweep import run_cells

        run_cells([self.loader.load_sweep_config(self.config, list(o)) for o in job_overrides])


ConfigStore.instance().store(
    group="hydra/launcher",
    name="sweep",
    node={"_target_": f"{SweepLauncher.__module__}.{SweepLauncher.__qualname__}"},
)
