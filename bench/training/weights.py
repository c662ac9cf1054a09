"""Weights for a model on the meta device, filled in one decoder layer after another.

An engine shards a layer before the next one is filled, so that a rank holds at most its shards and one layer.
Random weights depend on the seed and the parameter's name, and on no other parameter, rank or sharding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from bench.config import ModelConfig
from bench.ranks.log import WrongResultError
from bench.training.text_model import text_name

SEED_BYTES = 8
Names = Mapping[str, Sequence[str]]
"""Full names in the model of each parameter of one module, by its name in the module. A tied parameter has
several full names."""


class RandomWeights:
    """Random weights, drawn as transformers draws them for a new model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fill(self, model: PreTrainedModel, module: nn.Module, names: Names) -> None:
        """Set the parameters of a module that are keys of `names`, with a hash of the first as seed."""
        first, *_ = next(iter(names.values()))
        digest = hashlib.sha256(f"{self.seed} {first}".encode()).digest()
        _seed(int.from_bytes(digest[:SEED_BYTES], "little"), module.get_parameter(next(iter(names))).device)
        model._init_weights(module)


def _seed(number: int, device: torch.device) -> None:
    """Seed the generator of a device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)  # torch.manual_seed seeds all devices, in milliseconds
    else:
        torch.manual_seed(number)


class CheckpointWeights:
    """Weights in the safetensors files of a local folder; a tensor is read when it is needed."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        shards = [SAFE_WEIGHTS_NAME]
        if not (self.folder / SAFE_WEIGHTS_NAME).exists():  # which comes first in transformers too
            index = json.loads((self.folder / SAFE_WEIGHTS_INDEX_NAME).read_text())
            shards = sorted(set(index["weight_map"].values()))
        files: dict[str, str] = {}
        for shard in shards:  # an index may name another shard than the one that has a tensor
            with safe_open(self.folder / shard, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), shard)
        self.files = {text_name(name): file for name, file in files.items()}
        """File of each tensor, by its name in the text model."""
        self.stored_names = {text_name(name): name for name in files}
        """Name of each tensor in its file, by its name in the text model."""

    def fill(self, model: PreTrainedModel, module: nn.Module, names: Names) -> None:  # noqa: ARG002
        """Set the parameters of a module that are keys of `names`; raise ValueError if they do not fit."""
        for key, all_names in names.items():
            parameter, stored = module.get_parameter(key), self._read_parameter(all_names)
            if stored.shape != parameter.shape:
                raise ValueError(
                    f"{self.folder}: {all_names[0]} has shape {[*stored.shape]}, but its config.json requires"
                    f" {[*parameter.shape]}"
                )
            parameter.copy_(stored)
            if not parameter.sum().isfinite():
                self._raise_if_not_finite(all_names)

    def _read_parameter(self, names: Sequence[str]) -> Tensor:
        """Return the stored tensor of a parameter; tensors stored under several names must be equal."""
        tensors = [self._read(name) for name in names if name in self.files]
        if not tensors:
            raise ValueError(f"{self.folder}: no {names[0]} in its safetensors files")
        first, *others = tensors
        if not all(torch.equal(first, tensor) for tensor in others):
            self._raise_if_not_finite(names)  # NaN differs from itself
            raise ValueError(f"{self.folder}: {' and '.join(names)} differ, but its config.json ties them")
        return first

    def _raise_if_not_finite(self, names: Sequence[str]) -> None:
        """Raise WrongResultError if the stored tensor of one of these names holds NaN or infinity."""
        for name in (name for name in names if name in self.files):
            is_finite = self._read(name).isfinite()
            count = is_finite.numel() - int(is_finite.sum())
            if count:
                raise WrongResultError(
                    f"{self.folder / self.files[name]}: {name} holds NaN or infinity in {count} of its"
                    f" {is_finite.numel()} numbers; weights have to be finite, so take another checkpoint"
                )

    def _read(self, name: str) -> Tensor:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.stored_names[name])
        return tensor


Weights = RandomWeights | CheckpointWeights


def model_weights(config: ModelConfig, seed: int) -> Weights:
    """Return the weights of the checkpoint at `config.path`, or random weights without a path."""
    return RandomWeights(seed) if config.path is None else CheckpointWeights(config.path)


def fill_layers(model: PreTrainedModel, weights: Weights, device: torch.device) -> Iterator[nn.Module]:
    """Yield the decoder layers of a model on the meta device, filled with weights on `device`.

    A layer is filled just before it is yielded, and may be sharded at once. The rest of the model is filled
    after the last layer. Tied parameters stay tied.
    """
    filling = WeightFiller(model, weights, device)
    for layer in model.model.layers:
        filling.fill(layer.modules())
        yield layer
    filling.fill(model.modules())


class WeightFiller:
    """Filler of a model on the meta device, which gives it weights on `device` module by module."""

    def __init__(self, model: PreTrainedModel, weights: Weights, device: torch.device) -> None:
        self.model, self.weights, self.device = model, weights, device
        self.owners: defaultdict[Tensor, list[tuple[str, nn.Module, str]]] = defaultdict(list)
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                self.owners[parameter].append((f"{name}.{key}", module, key))

    def fill_ends(self) -> None:
        """Fill the modules outside of the decoder layers."""
        inside = {id(module) for module in self.model.model.layers.modules()}
        self.fill(module for module in self.model.modules() if id(module) not in inside)

    def take(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the weights of a layer by parameter name, and leave the layer on the meta device."""
        meta_parameters = [
            (module, key, parameter)
            for module in layer.modules()
            for key, parameter in module._parameters.items()
        ]
        self.fill(layer.modules())
        weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        for module, key, parameter in meta_parameters:
            module.register_parameter(key, parameter)
        return weights

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Fill the direct parameters and buffers of these modules that are still on the meta device."""
        for module in modules:
            names = self._allocate_parameters(module)
            buffers = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            for key in buffers:
                module._buffers[key] = self._nan_like(module.get_buffer(key))
            if names:
                self.weights.fill(self.model, module, names)
            elif buffers:
                self.model._init_weights(module)  # rotary frequencies, which no checkpoint has
            for key in (*names, *buffers):
                if getattr(module, key).sum().isnan():
                    raise ValueError(f"{type(module).__name__}.{key}: not all of its numbers were set")

    def _allocate_parameters(self, module: nn.Module) -> Names:
        """Replace a module's parameters on the meta device, also in modules that share them."""
        names = {}
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                allocated = nn.Parameter(self._nan_like(parameter), requires_grad=parameter.requires_grad)
                names[key] = [name for name, _, _ in self.owners[parameter]]
                for _, owner, owner_key in self.owners[parameter]:
                    owner.register_parameter(owner_key, allocated)
        return names

    def _nan_like(self, like: Tensor) -> Tensor:
        """Return a tensor of NaN on the device, so that `fill` can notice weights that are never set."""
        return torch.full_like(like, math.nan, device=self.device)
