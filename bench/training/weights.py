"""The numbers of a model that was built without any, one decoder layer after another.

An engine that shards each layer before the next is filled holds at most its shards and one layer. Random
numbers depend on the seed and a parameter's name, and on no other parameter, rank or sharding.
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
"""Parameters of one module by their name in it: their names in the model, several for one that is tied."""


class RandomNumbers:
    """Those that transformers draws for a new model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fill(self, model: PreTrainedModel, module: nn.Module, names: Names) -> None:
        """Set these parameters of a module."""
        first, *_ = next(iter(names.values()))
        digest = hashlib.sha256(f"{self.seed} {first}".encode()).digest()
        _seed(int.from_bytes(digest[:SEED_BYTES], "little"), module.get_parameter(next(iter(names))).device)
        model._init_weights(module)


def _seed(number: int, device: torch.device) -> None:
    """For what is drawn on this device. `torch.manual_seed` seeds every kind of device, in milliseconds."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


class CheckpointNumbers:
    """Those of a local folder's safetensors files, each read when it is needed."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        index = self.folder / SAFE_WEIGHTS_INDEX_NAME
        if index.exists():
            files: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(self.folder / SAFE_WEIGHTS_NAME, framework="pt") as file:
                files = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        self.files = {text_name(name): file for name, file in files.items()}
        self.stored = {text_name(name): name for name in files}

    def fill(self, model: PreTrainedModel, module: nn.Module, names: Names) -> None:  # noqa: ARG002
        """Set these parameters of a module."""
        for key, all_names in names.items():
            parameter, stored = module.get_parameter(key), self._stored(all_names)
            if stored.shape != parameter.shape:
                raise ValueError(
                    f"{self.folder}: {all_names[0]} has shape {[*stored.shape]}, not the {[*parameter.shape]}"
                    " of its config.json"
                )
            parameter.copy_(stored)
            if not parameter.sum().isfinite():
                self._refuse_not_finite(all_names)

    def _stored(self, names: Sequence[str]) -> Tensor:
        """The tensor that has any of these names of one parameter."""
        found = [self._read(name) for name in names if name in self.files]
        if not found:
            raise ValueError(f"{self.folder}: no {names[0]} in its safetensors files")
        if not all(torch.equal(found[0], other) for other in found[1:]):
            self._refuse_not_finite(names)  # NaN differs from itself
            raise ValueError(f"{self.folder}: {' and '.join(names)} differ, but its config.json ties them")
        return found[0]

    def _refuse_not_finite(self, names: Sequence[str]) -> None:
        """Raises WrongResultError where a file holds NaN or infinity for one of these names."""
        for name in (name for name in names if name in self.files):
            is_finite = self._read(name).isfinite()
            count = is_finite.numel() - int(is_finite.sum())
            if count:
                raise WrongResultError(
                    f"{self.folder / self.files[name]}: {name} holds NaN or infinity in {count} of its"
                    f" {is_finite.numel()} numbers; weights have to be finite: take another checkpoint"
                )

    def _read(self, name: str) -> Tensor:
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.stored[name])
        return tensor


Numbers = RandomNumbers | CheckpointNumbers


def numbers_of(config: ModelConfig, seed: int) -> Numbers:
    """A checkpoint's numbers where the model has a path, else random ones."""
    return RandomNumbers(seed) if config.path is None else CheckpointNumbers(config.path)


def filled_layers(model: PreTrainedModel, numbers: Numbers, device: torch.device) -> Iterator[nn.Module]:
    """The decoder layers of a model on the meta device, each filled when it is taken; the rest at the end.

    A layer may be sharded as soon as it is taken. Ties stay.
    """
    filling = Filling(model, numbers, device)
    for layer in model.model.layers:
        filling.fill(layer.modules())
        yield layer
    filling.fill(model.modules())


class Filling:
    """Numbers for the parameters of a model on the meta device, set on another device module by module."""

    def __init__(self, model: PreTrainedModel, numbers: Numbers, device: torch.device) -> None:
        self.model, self.numbers, self.device = model, numbers, device
        self.owners: defaultdict[Tensor, list[tuple[str, nn.Module, str]]] = defaultdict(list)
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                self.owners[parameter].append((f"{name}.{key}", module, key))

    def fill_ends(self) -> None:
        """Give numbers to what is outside of the decoder layers."""
        inside = {id(module) for module in self.model.model.layers.modules()}
        self.fill(module for module in self.model.modules() if id(module) not in inside)

    def take(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the numbers of a layer's parameters by name; the layer itself is left without any."""
        empty = [
            (module, key, each) for module in layer.modules() for key, each in module._parameters.items()
        ]
        self.fill(layer.modules())
        found = {name: each.detach() for name, each in layer.named_parameters()}
        for module, key, each in empty:
            module.register_parameter(key, each)
        return found

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Give numbers to what has none yet in these modules, not counting what is inside of them."""
        for module in modules:
            names = self._with_memory(module)
            buffers = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            for key in buffers:
                module._buffers[key] = self._unset(module.get_buffer(key))
            if names:
                self.numbers.fill(self.model, module, names)
            elif buffers:
                self.model._init_weights(module)  # rotary frequencies, which no checkpoint has
            for key in (*names, *buffers):
                if getattr(module, key).sum().isnan():
                    raise ValueError(f"{type(module).__name__}.{key}: not all of its numbers were set")

    def _with_memory(self, module: nn.Module) -> Names:
        """Give memory to the parameters that have none yet, in all modules that they are tied to."""
        names = {}
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                found = nn.Parameter(self._unset(parameter), requires_grad=parameter.requires_grad)
                names[key] = [name for name, _, _ in self.owners[parameter]]
                for _, owner, own_key in self.owners[parameter]:
                    owner.register_parameter(own_key, found)
        return names

    def _unset(self, like: Tensor) -> Tensor:
        return torch.full_like(like, math.nan, device=self.device)
