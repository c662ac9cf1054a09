"""What is observed: the transformers model inside whatever wraps it for training."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from bench.config import NOT_USED, ConfigError, ModelConfig
from bench.request.layer_types import experts_refused, has_experts, unplain_layers
from bench.request.model_numbers import transformers_numbers
from bench.training.engines import ENGINE_FACTS
from bench.training.text_model import text_numbers

ENGINE_OF_WRAPPER: Mapping[str, str] = {
    **{facts.wrapper: name for name, facts in ENGINE_FACTS.items() if facts.wrapper is not None},
    "FullyShardedDataParallel": "fsdp1",
}


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """`networks` are the transformers models in it, the outermost first; `called` also what wraps them."""

    called: Sequence[nn.Module]
    networks: Sequence[PreTrainedModel]
    engine: str

    @property
    def attention_name(self) -> str:
        """The name in transformers' table of attention functions."""
        return str(self.networks[0].config._attn_implementation)

    @property
    def checkpointing(self) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in self.networks[0].modules())

    def model_config(self) -> ModelConfig:
        """The model's numbers, under its class's name or that of the checkpoint it came from."""
        config = self.networks[0].config
        path = config.name_or_path or None
        numbers, model = text_numbers(config.to_dict()), type(self.networks[0]).__name__
        if has_experts(numbers):
            raise experts_refused("bench.observe", model)
        try:
            own_numbers = transformers_numbers(numbers)
        except KeyError as error:
            raise ConfigError(
                f"bench.observe: the configuration of {model} has no {error}; only plain decoders with"
                " attention in every layer can be observed"
            ) from None
        name = (path or model).rstrip("/").rpartition("/")[2]
        return ModelConfig(name=name, path=path, **own_numbers)

    def averages_gradients(self) -> bool:
        """Whether the engine itself divides the sum of all ranks' gradients by the number of ranks."""
        group = getattr(self.called[0], "process_group", None)
        if group is None or not isinstance(self.called[0], DistributedDataParallel):
            return self.engine.startswith("zero") and self.unknown_divisor() is None
        has_hook = bool(getattr(self.called[0], "_comm_hooks", ()))
        return dist.get_world_size(group) == dist.get_world_size() and not has_hook

    def unknown_divisor(self) -> str | None:
        """Why it is not known what the engine divides gradients by, where its name suggests something else.

        With sequence groups ZeRO 0, 1 and 2 add up the gradients of a group's ranks; ZeRO 3 divides by all.
        """
        sharers = getattr(self.called[0], "sequence_parallel_size", 1)
        if self.engine not in ("zero0", "zero1", "zero2") or sharers == 1:
            return None
        return (
            f"DeepSpeed was given sequence groups (mpu) under ZeRO stage {self.engine[-1]}, and it is not"
            " known what it divides gradients by there"
        )

    def other_layers(self, tokens: int) -> list[str]:
        """What is not plain causal attention over so many tokens, by configuration and what layers hold."""
        return [*unplain_layers(self.networks[0].config.to_dict(), tokens), *_other_modules(self.networks[0])]


def _other_modules(network: nn.Module) -> dict[str, None]:
    """Modules that mix tokens, or change scores, without a word in the configuration, by their class."""
    found: dict[str, None] = {}
    for module in network.modules():
        if any(isinstance(part, nn.Conv1d) for part in module.children()):
            found[f"{type(module).__name__} holds a convolution over tokens"] = None
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            found[f"{type(module).__name__} holds attention sinks"] = None
    return found


def observed_model(model: nn.Module) -> ObservedModel:
    """Raises ConfigError where there is no transformers model inside."""
    networks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not networks:
        raise ConfigError(
            f"bench.observe: {type(model).__name__} holds no transformers model, whose attention could be"
            " seen; hand over the model that transformers built, wrapped or not"
        )
    called = [*networks] if model is networks[0] else [model, *networks]
    return ObservedModel(called, networks, _engine(model))


def refuse_compiled(model: nn.Module) -> None:
    """Raises ConfigError where torch.compile has a part of the model, or something that it is a part of.

    A compiled function of somebody's own that calls the model cannot be found.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return
    parts = {*model.modules()}
    wrappers = (each for each in gc.get_objects() if issubclass(type(each), dynamo.OptimizedModule))
    if any(map(_is_compiled, parts)) or any(not parts.isdisjoint(each.modules()) for each in wrappers):
        raise ConfigError(
            "the model is compiled, and with something in it that looks at attention another program would"
            " be compiled, to other bits; observe it without torch.compile"
        )


def _is_compiled(module: nn.Module) -> bool:
    """Whether its call or its forward is, in place."""
    forward = vars(module).get("forward")
    is_replaced = hasattr(forward, "_torchdynamo_orig_callable")
    return module._compiled_call_impl is not None or (
        is_replaced and not getattr(forward, "_torchdynamo_disable", False)
    )


def _engine(model: nn.Module) -> str:
    """How the model is wrapped, in our words; `none` where it is not."""
    stage: Any = getattr(model, "zero_optimization_stage", None)
    if stage is not None:
        return f"zero{stage()}"
    names = [cls.__name__ for cls in type(model).__mro__]
    return next((ENGINE_OF_WRAPPER[name] for name in names if name in ENGINE_OF_WRAPPER), NOT_USED)
