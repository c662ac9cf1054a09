"""`with bench.observe(model, group):` around every step of a training loop of one's own."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.config import OWN, ConfigError
from bench.observation.cell import ObserveRequest
from bench.observation.loop_ranks import process_group
from bench.observation.observation import Observation


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
