"""Write small safetensors files of zeros."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def shapes_of(numbers: dict[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the parameters of a causal language model, by name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers))
    return {name: [*parameter.shape] for name, parameter in model.named_parameters(remove_duplicate=False)}


def write_weights(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file whose tensors are zeros in bf16."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
