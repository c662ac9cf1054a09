"""Find the transformers model, the engine and the attention inside a user's wrapped model."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from bench.config import NOT_USED, ConfigError, ModelConfig
from bench.request.layer_types import experts_error, has_experts
from bench.request.model_numbers import model_config_fields
from bench.training.engines import ENGINE_FACTS
from bench.training.text_model import text_config

ENGINE_OF_WRAPPER: Mapping[str, str] = {
    **{facts.wrapper: name for name, facts in ENGINE_FACTS.items() if facts.wrapper is not None},
    "FullyShardedDataParallel": "fsdp1",
}
"""Names of engines by the name of the class that they wrap a model in."""


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A transformers model, and the modules that the loop may call to run it."""

    entry_points: Sequence[nn.Module]
    """All modules that the loop may call: the outermost wrapper, if there is one, and then `networks`."""
    networks: Sequence[PreTrainedModel]
    """The transformers model and the models nested in it, such as its decoder; the outermost comes first."""
    sizes: ModelConfig
    """Numbers of the model, named after its checkpoint or its class."""
    engine: str
    compiled_entry: nn.Module | None
    """Outermost module if the model, or a module in it or around it, is compiled, else None."""

    def gradient_factor(self) -> float | None:
        """Return the factor between the sum of all ranks' gradients and the optimizer's; None if unknown.

        DeepSpeed averages over all ranks. With sequence groups (mpu) its stages 0, 1 and 2 add up the
        gradients of the ranks that share a sequence. FSDP2 has a factor that the loop may set.
        """
        model, world_size = self.entry_points[0], dist.get_world_size()
        if self.engine.startswith("zero"):
            adds_up = self.engine != "zero3"
            return (getattr(model, "sequence_parallel_size", 1) if adds_up else 1) / world_size
        sharded = (module for module in model.modules() if isinstance(module, FSDPModule))
        groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
        # A factor is that of a module alone, and ranks outside a mesh are the loop's own affair.
        sums = {(group.mesh_info.mesh.size(), group.gradient_divide_factor) for group in groups if group}
        if len(sums) != 1:
            return None
        ((ranks, divide_factor),) = sums
        return 1 / (divide_factor or world_size) if ranks == world_size else None


def observed_model(model: nn.Module) -> ObservedModel:
    """Find the transformers model in `model`. Raises ConfigError without a plain decoder."""
    networks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not networks:
        raise ConfigError(
            f"bench.observe: {type(model).__name__} holds no transformers model, and attention of other"
            " models cannot be observed; pass the model that transformers built, wrapped or not"
        )
    entry_points = [*networks] if model is networks[0] else [model, *networks]
    sizes, compiled_entry = _model_config(networks[0]), _compiled_entry(model)
    return ObservedModel(entry_points, networks, sizes, _engine(model), compiled_entry)


def _model_config(network: PreTrainedModel) -> ModelConfig:
    path, model = network.config.name_or_path or None, type(network).__name__
    decoder_config = text_config(network.config)
    if has_experts(decoder_config):
        raise experts_error("bench.observe", model)
    try:
        sizes = model_config_fields(decoder_config)
    except KeyError as error:
        raise ConfigError(
            f"bench.observe: the configuration of {model} has no {error}; only plain decoders with"
            " attention in every layer can be observed"
        ) from None
    name = (path or model).rstrip("/").rpartition("/")[2]
    return ModelConfig(name=name, path=path, **sizes)


def _compiled_entry(model: nn.Module) -> nn.Module | None:
    parts = {*model.modules()}
    compiled = [item for item in gc.get_objects() if type(item).__name__ == "OptimizedModule"]
    around = [module for module in compiled if not parts.isdisjoint(module.modules())]
    outermost = max([model, *around], key=lambda module: len([*module.modules()]))
    return outermost if around or any(map(_is_compiled, parts)) else None


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    is_replaced = hasattr(forward, "_torchdynamo_orig_callable")
    is_disabled = getattr(forward, "_torchdynamo_disable", False)
    return module._compiled_call_impl is not None or (is_replaced and not is_disabled)


def _engine(model: nn.Module) -> str:
    """Return the name of the engine that wraps the model; `none` if nothing does."""
    stage: Any = getattr(model, "zero_optimization_stage", None)
    if stage is not None:
        return f"zero{stage()}"
    names = [cls.__name__ for cls in type(model).__mro__]
    return next((ENGINE_OF_WRAPPER[name] for name in names if name in ENGINE_OF_WRAPPER), NOT_USED)
