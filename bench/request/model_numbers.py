"""The sizes and settings of a model, from conf/model/ or from the config.json of a local checkpoint.

`config` is a dict of keys as transformers names them; `ModelConfig` has our names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from bench.common.labels import value_label
from bench.config import AUTO, DEFAULT_INIT_STD, NOT_USED, ConfigError, ModelConfig
from bench.request import values
from bench.request.checkpoint_files import adapter_fault, weights_fault
from bench.request.choices import Raw, options, read_option
from bench.request.layer_types import PLAIN_FAMILIES, experts_error, has_experts, layers_not_plain
from bench.training.text_model import LISTED_FACTORS, read_config, rope_type

ROPE_SCALINGS = (NOT_USED, "linear", "dynamic", "yarn", "llama3")
"""Values of `model.rope_scaling`."""
ROPE_TYPES = (*ROPE_SCALINGS, LISTED_FACTORS)
"""Types of RoPE scaling that transformers computes for PLAIN_FAMILIES."""
FACTOR_RULE = Meta(ge=1, le=2**20, description="a number from 1", examples=["4.0"])
ROPE_KEYS = ("trained_len", "rope_scaling", "rope_factor")
MIN_GPUS_FOR_4B = 4
"""Smallest number of GPUs with which `model=auto` is a model of 4 billion weights."""


def model_config(raw: Raw, gpus: int, seq_len: int, *, needs_weights: bool = True) -> ModelConfig:
    """Return the model of a cell: a named model, a checkpoint, or for `auto` one that fits on `gpus` GPUs.

    RoPE scaling without a factor extends the model to `seq_len` tokens. Unless a cell needs the weights of a
    checkpoint, a folder with its config.json is enough.
    """
    name, rope = raw["name"], {key: raw[key] for key in ROPE_KEYS if key in raw}
    if name == "checkpoint":
        return _with_rope_scaling(_checkpoint_model(raw["path"], needs_weights), rope, seq_len)
    if name == "auto":
        raw = read_option("model", _auto_model(gpus))
    elif "family" not in raw:  # a name that replaced `auto` or `checkpoint`
        raw = read_option("model", values.choice("model", name, options("model")))
    model = _build_model({**raw, "rope_scaling": NOT_USED, "rope_factor": None})
    return _with_rope_scaling(model, rope, seq_len)


def _checkpoint_model(path: Any, needs_weights: bool) -> ModelConfig:
    raw = _read_checkpoint(path)
    try:
        model = _build_model(raw)
    except ConfigError as error:
        rule = str(error).partition("; ")[0]
        raise ConfigError(
            f"model.path={raw['path']}: by its config.json {rule}; correct it there, or name another folder"
        ) from None
    folder = Path(raw["path"])
    fault = weights_fault(folder, model, needs_weights)
    if fault:
        raise ConfigError(f"model.path={folder}: {fault}")
    return model


def _with_rope_scaling(model: ModelConfig, requested: Raw, seq_len: int) -> ModelConfig:
    """Return the model with the requested RoPE scaling; where it is `auto`, with that of the checkpoint.

    A factor that is `auto` extends the model to `seq_len` tokens. RoPE of a sequence within `trained_len`
    then stays plain.
    """
    if requested.get("trained_len") is not None:
        model = replace(model, trained_len=values.tokens("model.trained_len", requested["trained_len"]))
    scaling, factor = (requested.get(key, AUTO) for key in ("rope_scaling", "rope_factor"))
    if factor != AUTO:
        factor = values.convert("model.rope_factor", factor, Annotated[float, FACTOR_RULE])
    if scaling == AUTO:
        return model if factor == AUTO else _with_rope_factor(model, factor)
    scaling = values.choice("model.rope_scaling", scaling, ROPE_SCALINGS)
    if scaling == NOT_USED:
        return replace(model, rope_scaling=NOT_USED, rope_factor=None)
    if model.trained_len is None:
        raise ConfigError(
            f"model.rope_scaling={scaling}: needs model.trained_len; write model.trained_len=TOKENS"
        )
    if factor == AUTO:
        is_within = seq_len <= model.trained_len
        return replace(model, rope_scaling=NOT_USED if is_within else scaling, rope_factor=None)
    return replace(model, rope_scaling=scaling, rope_factor=factor)


def _with_rope_factor(model: ModelConfig, factor: float) -> ModelConfig:
    """Return the model with another factor of the RoPE scaling in its config.json."""
    if model.rope_scaling in (NOT_USED, LISTED_FACTORS):
        raise ConfigError(
            f"model.rope_factor={factor:g}: the model's rope_scaling={model.rope_scaling} has no such factor;"
            " write for example model.rope_scaling=yarn"
        )
    return replace(model, rope_factor=factor)


def _build_model(raw: Raw) -> ModelConfig:
    trained_len = raw["trained_len"]
    model = values.section(
        "model",
        raw,
        ModelConfig,
        name=values.text("model.name", raw["name"]),
        family=values.choice("model.family", raw["family"], PLAIN_FAMILIES),
        path=None if raw["path"] is None else values.path("model.path", raw["path"]),
        trained_len=None if trained_len is None else values.tokens("model.trained_len", trained_len),
        rope_scaling=str(raw["rope_scaling"]),
        init_std=values.positive("model.init_std", raw.get("init_std", DEFAULT_INIT_STD), example="0.02"),
    )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads}: must divide model.num_heads={model.num_heads};"
            f" write for example model.num_kv_heads={math.gcd(model.num_kv_heads, model.num_heads)}"
        )
    if model.head_dim % 2:
        raise ConfigError(
            f"model.head_dim={model.head_dim}: must be even for rotary positions; write for example"
            f" model.head_dim={model.head_dim + 1}"
        )
    return model


def _auto_model(gpus: int) -> str:
    if gpus == 0:
        return "qwen3_nano"
    return "qwen3_4b" if gpus >= MIN_GPUS_FOR_4B else "qwen3_0_6b"


def _read_checkpoint(path: Any) -> dict[str, Any]:
    """Return the section `model` for a local checkpoint; raise ConfigError if no cell can train it."""
    try:
        folder = Path(values.text("model.path", path))
    except ConfigError:
        raise ConfigError(
            f"model.path={value_label(path)}: is not the name of a folder; write for example"
            " model.path=/path/to/model"
        ) from None
    fault = adapter_fault(folder)
    if fault:
        raise ConfigError(f"model.path={folder}: {fault}")
    if not (folder / "config.json").is_file():  # reading a pipe would block
        raise ConfigError(
            f"model.path={path}: is not a checkpoint folder, with no file config.json; name a local folder of"
            " a Qwen3, Qwen2, Llama or Mistral model"
        )
    try:
        config = read_config(folder)
    except Exception as error:  # noqa: BLE001  transformers and its validators raise many kinds
        text = error.args[0] if isinstance(error, KeyError) else error.__cause__ or error
        cause = str(text).partition("\n")[0]
        raise ConfigError(
            f"model.path={path}: transformers cannot read its config.json ({cause}); correct it there, or"
            " name a local folder of a Qwen3, Qwen2, Llama or Mistral model"
        ) from None
    _refuse_untrainable(folder, config)
    fields = model_config_fields(config)
    return {"name": folder.resolve().name or "checkpoint", "path": str(folder.resolve()), **fields}


def _refuse_untrainable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a checkpoint that no cell can train, however short the sequences."""
    if has_experts(config):
        raise experts_error(f"model.path={folder}", f"a {config['model_type']}")
    family, unplain = config["model_type"], layers_not_plain(config, tokens=1)
    rope, dropout = config.get("rope_parameters") or {}, config.get("attention_dropout") or 0
    texts = [
        f"{key}={value!r}" for key, value in rope.items() if isinstance(value, str) and "type" not in key
    ]
    families, rope_types = ", ".join(PLAIN_FAMILIES), ", ".join(ROPE_TYPES[1:])
    faults = {  # messages, each with whether the checkpoint has this fault
        f"{'; '.join(unplain)}; strategies compute only plain causal attention, so name another": unplain,
        f"is a {family}, a family that cells cannot build; name a folder of one of {families}, or train it in"
        " your own loop with bench.observe": family not in PLAIN_FAMILIES,
        f"rope_type={rope_type(rope)} is not computed by transformers for a {family}; name a folder with"
        f" plain RoPE or one of {rope_types}": rope_type(rope) not in ROPE_TYPES,
        f"its config.json has {', '.join(texts)} as text; write a number there": texts,
        f"attention_dropout={dropout:g}, but no strategy drops scores; write 0 in its config.json": dropout,
        "its weights are quantized; name a folder with weights in bf16, fp16 or fp32": config.get(
            "quantization_config"
        )
        or config.get("compression_config"),
    }
    for message, applies in faults.items():
        if applies:
            raise ConfigError(f"model.path={folder}: {message}")


def model_config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ModelConfig`, except `name` and `path`, from a text model's configuration.

    Raises KeyError for a missing key.
    """
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    return {
        "family": config["model_type"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "attention_bias": config.get("attention_bias", False),
        "rope_theta": rope.get("rope_theta", 1e4),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "trained_len": rope.get("original_max_position_embeddings", config.get("max_position_embeddings")),
        "rope_scaling": rope_type(rope),
        "rope_factor": rope.get("factor"),
    }
