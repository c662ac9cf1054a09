"""Layers of a transformers configuration that the strategies cannot compute, described for messages.

The strategies compute plain layers only. In a plain layer a token attends to all earlier tokens of the
sequence. A layer that mixes no tokens is plain too. Scores that are scaled or capped are not described here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bench.config import ConfigError
from bench.training.text_model import ConfigDict

FAMILIES_WITHOUT_TYPE_LIST = ("llama", "mistral")
"""Model families whose layers all have one type; transformers ignores a list of layer types."""
PLAIN_FAMILIES = ("qwen3", "qwen2", *FAMILIES_WITHOUT_TYPE_LIST)
"""Model families that cells build. Their layers are plain, except that some have a window.

A window lets a token attend only to the last tokens before it. Keys of other families, such as those in
OTHER_MIXERS, have no effect in these families.
"""
PLAIN_LAYER_TYPES = frozenset({"full_attention", "attention", "*", "mlp", "moe", "-", "E"})
"""Types of plain layers, as configurations name them."""
TYPE_LIST_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Keys that list the type of each layer, as a list or as a string with one character per layer."""
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
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts in transformers configurations."""
MODELS_WITH_EXPERTS = ("qwen3_30b_a3b", "qwen3_235b_a22b")
"""Models with experts that a user may request, although conf/model/ has no file for them."""


def layers_not_plain(config: ConfigDict, tokens: int) -> list[str]:
    """Return a short description of each way in which layers are not plain in a sequence of `tokens` tokens.

    The list is empty if all layers are plain. Dropout of scores is not in the list.
    """
    windows = [description for size, description in _layer_windows(config) if size < tokens]
    rules = (_other_layer_types, _other_mixers, _other_mask, _different_layers)
    return [*windows, *(reason for rule in rules for reason in rule(config))]


def shortest_window(config: ConfigDict) -> int | None:
    """Return the size in tokens of the smallest window of any layer; None if no layer has a window.

    In a longer sequence the window hides earlier tokens from a token.
    """
    return min((size for size, _ in _layer_windows(config)), default=None)


def has_experts(config: ConfigDict) -> bool:
    """Return whether a transformers configuration describes a mixture of experts."""
    return config["model_type"] not in PLAIN_FAMILIES and any(config.get(name) for name in EXPERT_COUNT_KEYS)


def experts_error(setting: str, model: str) -> ConfigError:
    """Return the error that refuses a model with experts.

    `setting` is the word that chose the model, such as `model=qwen3_30b_a3b`; `model` is its name or kind.
    """
    return ConfigError(
        f"{setting}: {model} has experts; their FLOPs and their memory are not counted, and the checks"
        " compare with float64, which selects other experts than bf16 does; choose a dense model, such as"
        " qwen3_32b"
    )


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
    window = config.get("sliding_window")
    if not window or config["model_type"] == "llama":
        return []
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
    return config.get(WINDOW_KEYS.get(kind, "")) or None


def _layer_types(config: ConfigDict) -> Sequence[str]:
    """Return the type of every layer; empty if transformers ignores a list of types or has none."""
    if config["model_type"] in FAMILIES_WITHOUT_TYPE_LIST:
        return ()
    return next((config[key] for key in TYPE_LIST_KEYS if config.get(key)), ())


def _other_mixers(config: ConfigDict) -> list[str]:
    if config["model_type"] in PLAIN_FAMILIES or _layer_types(config):
        return []
    key = next((key for key in OTHER_MIXERS if config.get(key)), None)
    return [f"layers have {OTHER_MIXERS[key]} ({key}={config[key]})"] if key else []


def _other_mask(config: ConfigDict) -> list[str]:
    is_causal = config.get("is_causal") is not False
    return [] if is_causal else ["attention has no causal mask (is_causal=false)"]


def _different_layers(config: ConfigDict) -> list[str]:
    layers = config.get("per_layer_config")
    return [f"layers differ from one another (per_layer_config={layers})"] if layers else []
