"""The public `observe` and `ObserveCallback` for a user's own training script."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerCallback

from bench.config import USER_CODE, ConfigError
from bench.extras.observe.cell import ObserveRequest
from bench.extras.observe.loop_ranks import process_group
from bench.extras.observe.observation import Observation
from bench.request import values


def observe(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    strategy: str = USER_CODE,
    folder: str | Path = "results/observed",
    steps: int = 20,
    warmup_steps: int = 2,
    report: bool = True,
) -> Observation:
    """Return a context manager that measures and checks the steps of a training loop.

    Put every step into the context, on all ranks: forward, backward and the optimizer's update. After at most
    `warmup_steps + steps + 8` steps, rank 0 adds a record to `folder`, prints the speed and the checks, and
    writes a report; from then on the context does nothing. Losses are the same with and without the context.
    docs/observe.md explains the checks.

        for batch in loader:
            with bench.observe(model, sequence_group) as step:
                loss = model(**batch).loss
                step.loss(loss)  # optional: checks the training objective, too
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        model: The module that the loop calls: a transformers model, or one wrapped by DDP, FSDP or DeepSpeed.
        group: The ranks that share a sequence, as a process group or a one-dimensional device mesh. None if
            every rank has sequences of its own.
        strategy: Name in the record and the report.
        folder: Folder of `records.jsonl` and of the report. Loops with the same folder are compared.
        steps: Number of timed steps.
        warmup_steps: Number of full steps before the timed ones.
        report: Whether tables, figures and the page are written after the record.

    Returns:
        The observation of `model`, with `loss` and `record`. Calls with the same arguments return the same.

    Raises:
        ConfigError: An argument is not legal, the loop cannot be observed, or the model is already observed
            with other arguments. Raised before the first step.
        StoreError: Records in `folder` cannot be read.
    """
    request = ObserveRequest(
        strategy=str(strategy),
        folder=Path(folder),
        steps=values.whole_number("steps", steps),
        warmup_steps=values.whole_number("warmup_steps", warmup_steps, least=0),
        report=report,
    )
    earlier = Observation.by_model.get(model)
    if earlier is None or (earlier.is_over and earlier.request != request):
        Observation.by_model[model] = Observation(model, process_group(group), request)
    if Observation.by_model[model].request != request:
        raise ConfigError(
            "bench.observe: already observed with other arguments; pass the same ones in every step"
        )
    return Observation.by_model[model]


class ObserveCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Callback that observes every optimizer step of transformers' Trainer, or of TRL's trainers.

        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.add_callback(bench.ObserveCallback())
        trainer.train()

    Args:
        group: The ranks that share a sequence, as in `observe`.
        **choices: Further arguments of `observe`, such as `folder` and `steps`.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, **choices: Any) -> None:
        self.group = group
        self.choices = choices

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Start the observation. Raises ConfigError if the loop cannot be observed."""
        self._observation = observe(_find_wrapper(model), self.group, **self.choices)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._observation.__enter__()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._observation.loss()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._observation.__exit__(None, None, None)


def _find_wrapper(model: nn.Module) -> nn.Module:
    """Return the module that wraps the model, which Trainer does not pass to callbacks, or the model."""
    modules = (item for item in gc.get_objects() if issubclass(type(item), nn.Module))  # no proxies
    children = ((item, dict(vars(item).get("_modules", ()))) for item in modules)
    return next((item for item, names in children if names.get("module") is model), model)
