"""Layers that are not plain causal attention, as a transformers configuration names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

Numbers = Mapping[str, Any]
"""A transformers configuration: what config.json holds, or `to_dict` returns."""

PLAIN_TYPES = frozenset({"full_attention", "attention", "*", "mlp", "moe", "-", "E"})
"""What configurations call a layer of plain causal attention, or one that mixes no tokens."""
TYPES_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Where configurations list the types of their layers, or name each by a character."""
WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3")
"""How families' names begin that use their window only where `use_sliding_window` says so."""
OTHER_MIXERS: Mapping[str, str] = {
    "attention_chunk_size": "chunked attention",
    "full_attention_interval": "linear attention",
    "linear_attn_config": "linear attention",
    "linear_conv_kernel_dim": "linear attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "a state space",
    "ssm_state_size": "a state space",
    "state_size": "a state space",
    "conv_L_cache": "short convolutions",
    "lru_width": "a recurrent unit",
}
"""Keys that say, without a list of types, that some layers mix tokens otherwise."""
OTHER_SCORES: Mapping[str, str] = {
    "attn_logit_softcapping": "capped scores",
    "use_bidirectional_attention": "attention to later tokens",
    "alibi": "a bias of the scores",
}
"""Keys whose value, where there is one, changes what attention makes of its scores."""
PER_LAYER = ("head_dim", "num_attention_heads", "num_key_value_heads", "block_configs")
"""Numbers that are one for all layers in a plain model, and a list where layers differ."""
OTHER_HEAD_DIMS = ("global_head_dim", "swa_head_dim")
"""Keys of a second head dimension, of the layers that have one type."""
MULTIPLIERS = ("attention_multiplier",)
"""Keys that take the place of 1 / sqrt(head_dim)."""

SAME_SCALE = 1e-6
"""Relative: files hold a scale in decimals."""


def unplain_layers(numbers: Numbers) -> list[str]:
    """What of a model is not plain causal attention of one shape, each in a few words; empty for nothing.

    Dropout of the scores is left to `attention_dropout`: it changes training, not the kind of layer.
    """
    text = {**numbers, **(numbers.get("text_config") or {})}
    return [reason for rule in RULES for reason in rule(text)]


def attention_dropout(numbers: Numbers) -> float:
    """The probability with which training drops a score."""
    return float(numbers.get("attention_dropout") or 0)


def _listed_types(numbers: Numbers) -> list[str]:
    types = _types(numbers)
    counts = Counter(kind for kind in types if kind not in PLAIN_TYPES)
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return [
        f"{count} of {len(types)} layers are {kind}{_size(numbers, sizes.get(kind))}"
        for kind, count in counts.items()
    ]


def _types(numbers: Numbers) -> Sequence[str]:
    """The type of every layer; nothing where the configuration has no list of them."""
    return next((numbers[key] for key in TYPES_KEYS if numbers.get(key)), ())


def _size(numbers: Numbers, key: str | None) -> str:
    return f" ({key}={numbers[key]})" if key is not None and numbers.get(key) else ""


def _window(numbers: Numbers) -> list[str]:
    """A window that some layers use, in a configuration without a list of types."""
    window = numbers.get("sliding_window")
    by_default = not str(numbers.get("model_type")).startswith(WINDOW_OFF_BY_DEFAULT)
    if _types(numbers) or not window or not numbers.get("use_sliding_window", by_default):
        return []
    layers, plain = numbers.get("num_hidden_layers"), numbers.get("max_window_layers")
    if layers is not None and plain is not None:
        return [f"{layers - plain} of {layers} layers have sliding_window={window}"] if plain < layers else []
    return [f"layers have sliding_window={window}"]


def _mixers(numbers: Numbers) -> list[str]:
    if _types(numbers):
        return []
    return [f"layers have {what} ({key}={numbers[key]})" for key, what in _set(numbers, OTHER_MIXERS)]


def _scores(numbers: Numbers) -> list[str]:
    capped = [f"attention has {what} ({key}={numbers[key]})" for key, what in _set(numbers, OTHER_SCORES)]
    if numbers.get("is_causal") is False:
        capped.append("attention has no causal mask (is_causal=false)")
    return capped


def _scale(numbers: Numbers) -> list[str]:
    """A scale other than that of the head dimension."""
    size = _head_dim(numbers)
    if not isinstance(size, int):
        return []
    given = [(key, numbers[key]) for key in MULTIPLIERS if numbers.get(key) is not None]
    wrong = [(key, value) for key, value in given if not isclose(value, size**-0.5, rel_tol=SAME_SCALE)]
    scalar = numbers.get("query_pre_attn_scalar")
    if scalar is not None and scalar != size:
        wrong.append(("query_pre_attn_scalar", scalar))
    return [f"scores are scaled by {key}={value}, not by head_dim={size}" for key, value in wrong]


def _head_dim(numbers: Numbers) -> Any:
    size, heads = numbers.get("head_dim"), numbers.get("num_attention_heads")
    if size is None and isinstance(heads, int) and heads > 0 and numbers.get("hidden_size"):
        return numbers["hidden_size"] // heads
    return size


def _shapes(numbers: Numbers) -> list[str]:
    differ = [key for key in PER_LAYER if isinstance(numbers.get(key), list | tuple)]
    size = _head_dim(numbers)
    differ += [key for key in OTHER_HEAD_DIMS if numbers.get(key) not in (None, 0, size)]
    return [f"heads differ from layer to layer ({key}={numbers[key]})" for key in differ]


def _set(numbers: Numbers, known: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of the keys that are known those with a value, each thing they stand for once."""
    found: dict[str, str] = {}
    for key, what in known.items():
        if numbers.get(key):
            found.setdefault(what, key)
    return [(key, what) for what, key in found.items()]


RULES: tuple[Callable[[Numbers], list[str]], ...] = (
    _listed_types,
    _window,
    _mixers,
    _scores,
    _scale,
    _shapes,
)
