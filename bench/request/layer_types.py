"""Detection of layers that are not plain causal attention in a transformers configuration.

A plain layer is one of causal attention over the whole sequence, with heads of one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from bench.config import ConfigError
from bench.training.text_model import ConfigDict, text_config

READ_NO_LIST = ("llama", "mistral")
"""Families that ignore a list of layer types, because all of their layers have one type."""
READ_A_LIST = ("qwen2", "qwen3")
"""Families that read a list of layer types, `layer_types`."""
PLAIN_FAMILIES = (*READ_NO_LIST, *READ_A_LIST)
"""Families with plain layers except for a window; keys of other families have no effect on them."""
PLAIN_TYPES = frozenset({"full_attention", "attention", "*", "mlp", "moe", "-", "E"})
"""Types of layers that are plain causal attention or that mix no tokens."""
TYPES_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Keys with the types of all layers, as a list or as a string with a character for each layer."""
WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3")
"""Beginnings of the names of families that use a window only with `use_sliding_window`."""
DEFAULT_WINDOWS: Mapping[str, int] = {"mistral": 4096}
"""Windows that transformers uses for a family if the configuration states none."""
FIRST_WINDOWED = 28
"""First layer with a window if the configuration states no `max_window_layers`."""
WINDOW_KEYS: Mapping[str, str] = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Keys of the windows of layer types; such a layer is plain in a sequence no longer than its window."""
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
"""Keys that show, without a list of types, that some layers mix tokens by other means than attention."""
OTHER_SCORES: Mapping[str, str] = {
    "attn_logit_softcapping": "capped scores",
    "use_bidirectional_attention": "attention to later tokens",
    "alibi": "a bias of the scores",
}
"""Keys that, with a value, change how attention uses its scores."""
NOT_READ: Mapping[str, str] = {
    "gemma": "use_bidirectional_attention",
    "gemma3": "attn_logit_softcapping",
    "gemma3_text": "attn_logit_softcapping",
}
"""Key of OTHER_SCORES that a family's configuration contains and its attention ignores."""
PER_LAYER = ("head_dim", "num_attention_heads", "num_key_value_heads")
"""Keys that hold one number in a plain model, and a list if layers differ."""
OTHER_HEAD_DIMS = ("global_head_dim", "swa_head_dim")
"""Keys of a second head dimension, which the layers of one type have."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts in transformers configurations."""
MODELS_WITH_EXPERTS = ("qwen3_30b_a3b", "qwen3_235b_a22b")
"""Names that follow the pattern of conf/model/, where no file has them."""
SAME_SCALE = 1e-6
"""Relative tolerance for equal scales, as files store a scale in decimals."""


def layers_not_plain(numbers: ConfigDict, tokens: int) -> list[str]:
    """Return short descriptions of all that is not plain causal attention in a sequence of `tokens` tokens.

    `attention_dropout` covers dropout of the scores, which changes training and not the type of a layer.
    """
    text = text_config(numbers)
    rules = PLAIN_RULES if text.get("model_type") in PLAIN_FAMILIES else RULES
    return [*_short_windows(text, tokens), *(reason for rule in rules for reason in rule(text))]


def shortest_window(numbers: ConfigDict) -> int | None:
    """Return the longest sequence in which no window hides a token from a layer; None without a window."""
    return min((size for size, _ in _layer_windows(text_config(numbers))), default=None)


def attention_dropout(numbers: ConfigDict) -> float:
    """Return the probability with which training drops a score."""
    return float(numbers.get("attention_dropout") or 0)


def has_experts(numbers: ConfigDict) -> bool:
    """Return whether a transformers configuration describes a mixture of experts."""
    return numbers.get("model_type") not in PLAIN_FAMILIES and any(
        numbers.get(name) for name in EXPERT_COUNTS
    )


def experts_error(what: str, model: str) -> ConfigError:
    """Return the error that refuses a model with experts; `what` is the user's word for it."""
    return ConfigError(
        f"{what}: {model} has experts, whose operations and memory are not counted; the checks' float64"
        " reference would also select other experts than bf16; choose a dense model, such as qwen3_32b"
    )


def _short_windows(numbers: ConfigDict, tokens: int) -> list[str]:
    return [description for size, description in _layer_windows(numbers) if size < tokens]


def _layer_windows(numbers: ConfigDict) -> list[tuple[int, str]]:
    """Return the size of each window with a description of the layers that have it."""
    types = _layer_types(numbers)
    if types:
        counts = Counter(types)
        sizes = {kind: _window_size(numbers, kind) for kind in WINDOW_KEYS if counts[kind]}
        return [
            (size, f"{counts[kind]} of {len(types)} layers are {kind} ({WINDOW_KEYS[kind]}={size})")
            for kind, size in sizes.items()
            if size
        ]
    family = str(numbers.get("model_type"))
    window = numbers.get("sliding_window", DEFAULT_WINDOWS.get(family))
    by_default = family != "llama" and not family.startswith(WINDOW_OFF_BY_DEFAULT)
    # Mistral ignores `use_sliding_window`.
    is_on = by_default if family in READ_NO_LIST else numbers.get("use_sliding_window", by_default)
    if not window or not is_on:
        return []
    layers = numbers.get("num_hidden_layers")
    plain = numbers.get("max_window_layers", FIRST_WINDOWED if family in READ_A_LIST else None)
    if family not in READ_NO_LIST and layers is not None and plain is not None:
        description = f"{layers - plain} of {layers} layers have sliding_window={window}"
        return [(window, description)] if plain < layers else []
    return [(window, f"layers have sliding_window={window}")]


def _other_layer_types(numbers: ConfigDict) -> list[str]:
    """Describe the layers of other types, except layers with a window, which `_layer_windows` describes."""
    types = _layer_types(numbers)
    counts = Counter(kind for kind in types if kind not in PLAIN_TYPES)
    return [
        f"{count} of {len(types)} layers are {kind}"
        for kind, count in counts.items()
        if not _window_size(numbers, kind)
    ]


def _window_size(numbers: ConfigDict, kind: str) -> int | None:
    """Return the window of layers of this type; None without one, or if transformers ignores it."""
    if numbers.get("model_type") in READ_A_LIST and not (
        kind == "sliding_attention" and numbers.get("use_sliding_window")
    ):
        return None
    return numbers.get(WINDOW_KEYS.get(kind, "")) or None


def _layer_types(numbers: ConfigDict) -> Sequence[str]:
    """Return the type of every layer; empty if the family reads no list of types."""
    family = numbers.get("model_type")
    keys = () if family in READ_NO_LIST else ("layer_types",) if family in READ_A_LIST else TYPES_KEYS
    return next((numbers[key] for key in keys if numbers.get(key)), ())


def _other_mixers(numbers: ConfigDict) -> list[str]:
    if _layer_types(numbers):
        return []
    keys = _keys_with_values(numbers, OTHER_MIXERS)
    return [f"layers have {what} ({key}={numbers[key]})" for key, what in keys]


def _other_scores(numbers: ConfigDict) -> list[str]:
    ignored = NOT_READ.get(str(numbers.get("model_type")))
    keys = _keys_with_values(numbers, OTHER_SCORES)
    return [f"attention has {what} ({key}={numbers[key]})" for key, what in keys if key != ignored]


def _other_mask(numbers: ConfigDict) -> list[str]:
    is_causal = numbers.get("is_causal") is not False
    return [] if is_causal else ["attention has no causal mask (is_causal=false)"]


def _other_scale(numbers: ConfigDict) -> list[str]:
    """Describe a scale of the scores that does not follow from the head dimension."""
    size = _head_dim(numbers)
    if not isinstance(size, int):
        return []
    usual = {"attention_multiplier": size**-0.5, "query_pre_attn_scalar": size}
    stated = {key: numbers[key] for key in usual if numbers.get(key) is not None}
    return [
        f"scores are scaled by {key}={value}, not by head_dim={size}"
        for key, value in stated.items()
        if not isclose(value, usual[key], rel_tol=SAME_SCALE)
    ]


def _head_dim(numbers: ConfigDict) -> Any:
    size, heads = numbers.get("head_dim"), numbers.get("num_attention_heads")
    if size is None and isinstance(heads, int) and heads > 0 and numbers.get("hidden_size"):
        return numbers["hidden_size"] // heads
    return size


def _per_layer_heads(numbers: ConfigDict) -> list[str]:
    return _differing_heads(numbers, [key for key in PER_LAYER if isinstance(numbers.get(key), list | tuple)])


def _second_heads(numbers: ConfigDict) -> list[str]:
    size = _head_dim(numbers)
    keys = [key for key in OTHER_HEAD_DIMS if numbers.get(key) not in (None, 0, size)]
    return _differing_heads(numbers, [*keys, *(["block_configs"] if numbers.get("block_configs") else [])])


def _differing_heads(numbers: ConfigDict, keys: Sequence[str]) -> list[str]:
    return [f"heads differ from layer to layer ({key}={numbers[key]})" for key in keys]


def _keys_with_values(numbers: ConfigDict, known: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the known keys that have a value, with their meaning; one key for each meaning."""
    keys: dict[str, str] = {}
    for key, meaning in known.items():
        if numbers.get(key):
            keys.setdefault(meaning, key)
    return [(key, meaning) for meaning, key in keys.items()]


PLAIN_RULES: tuple[Callable[[ConfigDict], list[str]], ...] = (
    _other_layer_types,
    _other_mask,
    _per_layer_heads,
)
"""Rules for PLAIN_FAMILIES; each returns descriptions of layers that are not plain."""
RULES = (*PLAIN_RULES, _other_mixers, _other_scores, _other_scale, _second_heads)
