"""Layers of a transformers configuration that the strategies cannot compute, described for messages.

The strategies compute plain layers only. In a plain layer a token attends to all earlier tokens of the
sequence, by the softmax of scores with the scale 1/sqrt(head_dim), and the heads have the same shape as those
of the other layers. A layer that mixes no tokens is plain too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from bench.config import ConfigError
from bench.training.text_model import ConfigDict, text_config

FAMILIES_WITHOUT_TYPE_LIST = ("llama", "mistral")
"""Model families whose layers all have one type; transformers ignores a list of layer types."""
FAMILIES_WITH_TYPE_LIST = ("qwen2", "qwen3")
"""Model families for which transformers reads the list `layer_types`."""
PLAIN_FAMILIES = (*FAMILIES_WITHOUT_TYPE_LIST, *FAMILIES_WITH_TYPE_LIST)
"""Model families whose layers are plain, except that some have a window.

A window lets a token attend only to the last tokens before it. Keys of other families, such as those in
OTHER_MIXERS, have no effect in these families.
"""
PLAIN_LAYER_TYPES = frozenset({"full_attention", "attention", "*", "mlp", "moe", "-", "E"})
"""Types of plain layers, as configurations name them."""
TYPE_LIST_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Keys that list the type of each layer, as a list or as a string with one character per layer."""
FAMILIES_WITH_WINDOW_SWITCH = ("qwen2", "qwen3")
"""Beginnings of the names of families that use their window only if `use_sliding_window` is true."""
DEFAULT_WINDOWS: Mapping[str, int] = {"mistral": 4096}
"""Windows that transformers uses for a family if the configuration states none."""
DEFAULT_FIRST_WINDOW_LAYER = 28
"""Index of the first layer with a window if the configuration states no `max_window_layers`."""
WINDOW_KEYS: Mapping[str, str] = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Keys of the window in tokens, by layer type; a layer is plain in a sequence no longer than its window."""
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
SCORE_CHANGES: Mapping[str, str] = {
    "attn_logit_softcapping": "capped scores",
    "use_bidirectional_attention": "attention to later tokens",
    "alibi": "a bias of the scores",
}
"""Keys that change the scores or the mask of attention unless they are absent, false or zero."""
IGNORED_SCORE_KEYS: Mapping[str, str] = {
    "gemma": "use_bidirectional_attention",
    "gemma3": "attn_logit_softcapping",
    "gemma3_text": "attn_logit_softcapping",
}
"""Key of SCORE_CHANGES that transformers ignores in the configurations of a family, by family."""
PER_LAYER_KEYS = ("head_dim", "num_attention_heads", "num_key_value_heads")
"""Keys that hold one number if all layers have the same heads, and otherwise a list, one number per layer."""
SECOND_HEAD_DIM_KEYS = ("global_head_dim", "swa_head_dim")
"""Keys of a head dimension that only the layers of one type have."""
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts in transformers configurations."""
MODELS_WITH_EXPERTS = ("qwen3_30b_a3b", "qwen3_235b_a22b")
"""Models with experts that a user may request, although conf/model/ has no file for them."""
SCALE_TOLERANCE = 1e-6
"""Relative difference up to which two scales are equal, since a file stores a scale as a rounded decimal."""


def layers_not_plain(config: ConfigDict, tokens: int) -> list[str]:
    """Return a short description of each way in which layers are not plain in a sequence of `tokens` tokens.

    The list is empty if all layers are plain. Dropout of scores is not in the list: see `attention_dropout`.
    """
    text = text_config(config)
    rules = PLAIN_RULES if text.get("model_type") in PLAIN_FAMILIES else RULES
    return [*_short_windows(text, tokens), *(reason for rule in rules for reason in rule(text))]


def shortest_window(config: ConfigDict) -> int | None:
    """Return the size in tokens of the smallest window of any layer; None if no layer has a window.

    In a longer sequence the window hides earlier tokens from a token.
    """
    return min((size for size, _ in _layer_windows(text_config(config))), default=None)


def attention_dropout(config: ConfigDict) -> float:
    """Return the probability with which training drops a score."""
    return float(config.get("attention_dropout") or 0)


def has_experts(config: ConfigDict) -> bool:
    """Return whether a transformers configuration describes a mixture of experts."""
    return config.get("model_type") not in PLAIN_FAMILIES and any(
        config.get(name) for name in EXPERT_COUNT_KEYS
    )


def experts_error(setting: str, model: str) -> ConfigError:
    """Return the error that refuses a model with experts.

    `setting` is the word that chose the model, such as `model=qwen3_30b_a3b`; `model` is its name or kind.
    """
    return ConfigError(
        f"{setting}: {model} has experts; their FLOPs and their memory are not counted, and the checks"
        " compare with float64, which selects other experts than bf16 does; choose a dense model, such as"
        " qwen3_32b"
    )


def _short_windows(config: ConfigDict, tokens: int) -> list[str]:
    return [description for size, description in _layer_windows(config) if size < tokens]


def _layer_windows(config: ConfigDict) -> list[tuple[int, str]]:
    """Return the size of each window in tokens, with a description of the layers that have it."""
    types = _layer_types(config)
    if types:
        counts = Counter(types)
        sizes = {kind: _window_size(config, kind) for kind in WINDOW_KEYS if counts[kind]}
        return [
            (size, f"{counts[kind]} of {len(types)} layers are {kind} ({WINDOW_KEYS[kind]}={size})")
            for kind, size in sizes.items()
            if size
        ]
    family = str(config.get("model_type"))
    window = config.get("sliding_window", DEFAULT_WINDOWS.get(family))
    is_on_by_default = family != "llama" and not family.startswith(FAMILIES_WITH_WINDOW_SWITCH)
    # Llama never has a window, and Mistral ignores `use_sliding_window`.
    is_on = is_on_by_default
    if family not in FAMILIES_WITHOUT_TYPE_LIST:
        is_on = config.get("use_sliding_window", is_on_by_default)
    if not window or not is_on:
        return []
    layers = config.get("num_hidden_layers")
    default_first = DEFAULT_FIRST_WINDOW_LAYER if family in FAMILIES_WITH_TYPE_LIST else None
    first = config.get("max_window_layers", default_first)  # the layers before it have no window
    if family not in FAMILIES_WITHOUT_TYPE_LIST and layers is not None and first is not None:
        description = f"{layers - first} of {layers} layers have sliding_window={window}"
        return [(window, description)] if first < layers else []
    return [(window, f"layers have sliding_window={window}")]


def _other_layer_types(config: ConfigDict) -> list[str]:
    """Describe layers whose type is not plain, except those with a window: see `_layer_windows`."""
    types = _layer_types(config)
    counts = Counter(kind for kind in types if kind not in PLAIN_LAYER_TYPES)
    return [
        f"{count} of {len(types)} layers are {kind}"
        for kind, count in counts.items()
        if not _window_size(config, kind)
    ]


def _window_size(config: ConfigDict, kind: str) -> int | None:
    """Return the window of layers of type `kind`; None without one, or if transformers ignores it."""
    if config.get("model_type") in FAMILIES_WITH_TYPE_LIST and not (
        kind == "sliding_attention" and config.get("use_sliding_window")
    ):
        return None
    return config.get(WINDOW_KEYS.get(kind, "")) or None


def _layer_types(config: ConfigDict) -> Sequence[str]:
    """Return the type of every layer; empty if transformers ignores a list of types or the file has none."""
    family = config.get("model_type")
    if family in FAMILIES_WITHOUT_TYPE_LIST:
        return ()
    keys = ("layer_types",) if family in FAMILIES_WITH_TYPE_LIST else TYPE_LIST_KEYS
    return next((config[key] for key in keys if config.get(key)), ())


def _other_mixers(config: ConfigDict) -> list[str]:
    if _layer_types(config):  # `_other_layer_types` describes the layers
        return []
    keys = _keys_with_values(config, OTHER_MIXERS)
    return [f"layers have {mixer} ({key}={config[key]})" for key, mixer in keys]


def _other_scores(config: ConfigDict) -> list[str]:
    ignored = IGNORED_SCORE_KEYS.get(str(config.get("model_type")))
    keys = _keys_with_values(config, SCORE_CHANGES)
    return [f"attention has {change} ({key}={config[key]})" for key, change in keys if key != ignored]


def _other_mask(config: ConfigDict) -> list[str]:
    is_causal = config.get("is_causal") is not False
    return [] if is_causal else ["attention has no causal mask (is_causal=false)"]


def _other_scale(config: ConfigDict) -> list[str]:
    """Describe a scale of the scores other than 1/sqrt(head_dim)."""
    head_dim = _head_dim(config)
    if not isinstance(head_dim, int):
        return []
    # `attention_multiplier` is the scale, and `query_pre_attn_scalar` the number under the root.
    usual = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    stated = {key: config[key] for key in usual if config.get(key) is not None}
    return [
        f"the scale of scores follows from {key}={value}, not from head_dim={head_dim}"
        for key, value in stated.items()
        if not isclose(value, usual[key], rel_tol=SCALE_TOLERANCE)
    ]


def _head_dim(config: ConfigDict) -> Any:
    """Return `head_dim`, or by default hidden_size / num_attention_heads; a list if it differs by layer."""
    head_dim, heads = config.get("head_dim"), config.get("num_attention_heads")
    if head_dim is None and isinstance(heads, int) and heads > 0 and config.get("hidden_size"):
        return config["hidden_size"] // heads
    return head_dim


def _heads_by_layer(config: ConfigDict) -> list[str]:
    return _differing_heads(
        config, [key for key in PER_LAYER_KEYS if isinstance(config.get(key), list | tuple)]
    )


def _heads_by_layer_type(config: ConfigDict) -> list[str]:
    """Describe a second head dimension, and `block_configs`, which describes the heads of each layer."""
    head_dim = _head_dim(config)
    keys = [key for key in SECOND_HEAD_DIM_KEYS if config.get(key) not in (None, 0, head_dim)]
    return _differing_heads(config, [*keys, *(["block_configs"] if config.get("block_configs") else [])])


def _differing_heads(config: ConfigDict, keys: Sequence[str]) -> list[str]:
    return [f"heads differ from layer to layer ({key}={config[key]})" for key in keys]


def _keys_with_values(config: ConfigDict, meanings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the keys of `meanings` that have a true value, with their meaning; one key for each meaning."""
    keys: dict[str, str] = {}
    for key, meaning in meanings.items():
        if config.get(key):
            keys.setdefault(meaning, key)
    return [(key, meaning) for meaning, key in keys.items()]


PLAIN_RULES: tuple[Callable[[ConfigDict], list[str]], ...] = (
    _other_layer_types,
    _other_mask,
    _heads_by_layer,
)
"""Rules for PLAIN_FAMILIES; each returns descriptions of layers that are not plain, windows apart."""
RULES = (*PLAIN_RULES, _other_mixers, _other_scores, _other_scale, _heads_by_layer_type)
"""Rules for all other families."""
