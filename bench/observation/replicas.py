"""The parameters that several ranks hold, by their bits, after the last step that was observed."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.observation.loop import Loop
from bench.passes.rank_pass import RankPass
from bench.passes.updates.rank import digest, not_finite
from bench.passes.updates.section import RankUpdates


class LoopReplicas(RankPass):
    """Whether the ranks still train one model: gradients that nobody averaged make it several."""

    def part(self) -> RankUpdates:
        loop = self.measurement.subject
        assert isinstance(loop, Loop)
        held = dict(trained(loop.model.called[0], loop.model.engine))
        return RankUpdates(
            shard_index=0,  # the names say which shard it is
            digests={name: digest(values) for name, values in held.items()},
            unmoved=[],
            not_finite=[*not_finite(held.items())],
        )


def trained(model: nn.Module, engine: str) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of every parameter that trains; other ranks' parts of that name are equal.

    Names end with a shard's place where a rank holds no whole parameter; ZeRO-3 leaves only small ones whole.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = parameter.detach()
        local = values.to_local() if isinstance(values, DTensor) else values
        if local.numel() > 0:
            yield f"{name}{_shard(model, engine, values)}", local


def _shard(model: nn.Module, engine: str, values: Tensor) -> str:
    """Which part of a parameter it is, in a way that ranks with the same part agree on."""
    if isinstance(values, DTensor):
        place = values.device_mesh.get_coordinate() or ()
        parts = [at for at, dealt in zip(place, values.placements, strict=False) if not dealt.is_replicate()]
        return f" [shard {', '.join(map(str, parts))}]" if parts else ""
    own_parts = engine == "fsdp1" or any(getattr(each, "tp_size", None) for each in model.modules())
    return f" [shard of rank {dist.get_rank()}]" if own_parts else ""
