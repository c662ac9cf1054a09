"""Functions for a user's own script: `observe` around every step, a callback of Trainer's, and `probe`."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, TrainerCallback

from bench.config import OWN, ConfigError
from bench.extras.observe.cell import ObserveRequest
from bench.extras.observe.loop_ranks import process_group
from bench.extras.observe.observation import Observation
from bench.measure.probe.leaks import Places, changes_of, leaks, parts_of
from bench.measure.probe.rank import added_up
from bench.measure.probe.section import Moved


def observe(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    strategy: str = OWN,
    folder: str | Path = "results/observed",
    steps: int = 20,
    warmup_steps: int = 2,
    report: bool = True,
) -> Observation:
    """A context for every step of a loop that trains `model`; the same one, however often it is asked for.

    `group` are the ranks that share a sequence, None where none do. Every rank must enter it. After
    `warmup_steps` + `steps` + 6 steps rank 0 adds a record to `folder` and reports. `strategy` is the name
    it has there; with one of ours, the shapes and bytes that this strategy must show are checked, too. A
    step that raises leaves a record that says so. Without `report` there is only the record. Raises
    ConfigError for what cannot be observed.
    """
    request = ObserveRequest(
        strategy=strategy, folder=Path(folder), steps=steps, warmup_steps=warmup_steps, report=report
    )
    known = Observation.of_models.get(model)
    if known is None:
        known = Observation.of_models[model] = Observation(model, process_group(group), request)
    elif known.request != request:
        raise ConfigError(
            "bench.observe: this model is observed already, with other choices; a model is observed once"
        )
    return known


class ObserveCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """`trainer.add_callback(bench.ObserveCallback())`: every optimizer step is observed, as by `observe`.

    Transformers' Trainer has no place for a `with`, nor has what is made of it, such as TRL's trainers.

    It takes what `observe` takes, less the model. The objective is compared with what Trainer promises: the
    mean loss over the labels of all ranks and micro-steps. Batches are fetched before a step begins, so their
    time is none of its. A step that raises leaves no record: Trainer tells callbacks nothing of it.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, **choices: Any) -> None:
        self.group = group
        self.choices = choices
        self._observation: Observation | None = None

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Raises ConfigError for what cannot be observed, before the first step."""
        self._observation = observe(wrapped(model), self.group, **self.choices)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._observation is not None:
            self._observation.__enter__()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """After backward and the update: the step's labels say how many tokens count."""
        if self._observation is not None:
            self._observation.loss()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._observation is not None:
            self._observation.__exit__(None, None, None)


def wrapped(model: nn.Module) -> nn.Module:
    """What wraps the model for training, which Trainer keeps from callbacks; the model where nothing does."""
    return next(filter(partial(_holds, model), gc.get_objects()), model)


def _holds(model: nn.Module, each: object) -> bool:
    """By its type's own word: an object that stands for another may have none of its attributes yet."""
    parts = vars(each).get("_modules") if issubclass(type(each), nn.Module) else None
    return isinstance(parts, dict) and parts.get("module") is model


def probe(
    model: PreTrainedModel,
    input_ids: Tensor,
    documents: Tensor,
    positions: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    **named: Any,
) -> dict[str, Moved]:
    """Return what moves when one token changes, in the whole `model` and in each kind of its layers.

    `input_ids`, `documents` (a number for each document) and `positions` (in the whole sequence, from 0 where
    none are given) are [batch, tokens] of this rank's shard; `group` are the ranks that share the sequences.
    `named` is whatever else the model is called with, such as `position_ids`. Nothing of the model changes.
    Hand it over before FSDP or DeepSpeed takes its parameters apart; every rank of the group must call it.
    """
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    own = Places(documents, positions)
    changes = changes_of(own if group is None else _gathered(own, group))
    counts, _ = leaks(parts_of(model, input_ids, named), own, changes)
    return added_up(counts, group)


def _gathered(own: Places, group: dist.ProcessGroup) -> Places:
    """The places of all ranks' tokens, in any order."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (own.documents.cpu(), own.positions.cpu()), group=group)
    return Places(*(torch.cat(each, dim=1) for each in zip(*everyone, strict=True)))
