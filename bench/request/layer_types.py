"""Layers that are not plain causal attention, as a transformers configuration names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from bench.config import ConfigError
from bench.training.text_model import Numbers, text_numbers

READ_NO_LIST = ("llama", "mistral")
"""Families whose layers are all of one type, whatever their configuration lists."""
READ_A_LIST = ("qwen2", "qwen3")
PLAIN_FAMILIES = (*READ_NO_LIST, *READ_A_LIST)
"""Families that are plain but for a window: other families' keys have no effect on them."""
PLAIN_TYPES = frozenset({"full_attention", "attention", "*", "mlp", "moe", "-", "E"})
"""What configurations call a layer of plain causal attention, or one that mixes no tokens."""
TYPES_KEYS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Where configurations list the types of their layers, or name each by a character."""
WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3")
"""How families' names begin that use their window only where `use_sliding_window` says so."""
DEFAULT_WINDOWS: Mapping[str, int] = {"mistral": 4096}
"""What transformers takes where a configuration does not name its window."""
FIRST_WINDOWED = 28
"""The first layer with a window, where a configuration does not name it."""
WINDOW_KEYS: Mapping[str, str] = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Types of layers that are plain in a sequence no longer than this number."""
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
NOT_READ: Mapping[str, str] = {
    "gemma": "use_bidirectional_attention",
    "gemma3": "attn_logit_softcapping",
    "gemma3_text": "attn_logit_softcapping",
}
"""Which of these a family's configuration has, but its attention does not read."""
PER_LAYER = ("head_dim", "num_attention_heads", "num_key_value_heads")
"""Numbers that are one for all layers in a plain model, and a list where layers differ."""
OTHER_HEAD_DIMS = ("global_head_dim", "swa_head_dim")
"""Keys of a second head dimension, of the layers that have one type."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How a transformers configuration says that a model has experts."""
MODELS_WITH_EXPERTS = ("qwen3_30b_a3b", "qwen3_235b_a22b")
"""Names that would fit beside those in conf/model/."""
SAME_SCALE = 1e-6
"""Relative: files hold a scale in decimals."""


def unplain_layers(numbers: Numbers, tokens: int) -> list[str]:
    """What is not plain causal attention of one shape in a sequence of so many tokens, each in a few words.

    Dropout of the scores is left to `attention_dropout`: it changes training, not the kind of layer.
    """
    text = text_numbers(numbers)
    rules = PLAIN_RULES if text.get("model_type") in PLAIN_FAMILIES else RULES
    return [*_windows(text, tokens), *(reason for rule in rules for reason in rule(text))]


def shortest_window(numbers: Numbers) -> int | None:
    """The longest sequence in which no layer's window hides a token; None where there is no window."""
    return min((size for size, _ in _windowed(text_numbers(numbers))), default=None)


def attention_dropout(numbers: Numbers) -> float:
    """The probability with which training drops a score."""
    return float(numbers.get("attention_dropout") or 0)


def has_experts(numbers: Numbers) -> bool:
    """Whether a transformers configuration is that of a mixture of experts."""
    return numbers.get("model_type") not in PLAIN_FAMILIES and any(
        numbers.get(name) for name in EXPERT_COUNTS
    )


def experts_refused(what: str, model: str) -> ConfigError:
    """The error that says why, and the way out; `what` was asked for."""
    return ConfigError(
        f"{what}: {model} has experts, whose operations and memory are not counted, and of which float64, the"
        " checks' reference, selects others than bf16; choose a dense model, such as qwen3_32b"
    )


def _windows(numbers: Numbers, tokens: int) -> list[str]:
    return [reason for size, reason in _windowed(numbers) if size < tokens]


def _windowed(numbers: Numbers) -> list[tuple[int, str]]:
    """Every window's size, and which layers have it."""
    types = _types(numbers)
    if types:
        counts = Counter(types)
        sizes = {kind: _size(numbers, kind) for kind in WINDOW_KEYS if counts[kind]}
        return [
            (size, f"{counts[kind]} of {len(types)} layers are {kind} ({WINDOW_KEYS[kind]}={size})")
            for kind, size in sizes.items()
            if size
        ]
    family = str(numbers.get("model_type"))
    window = numbers.get("sliding_window", DEFAULT_WINDOWS.get(family))
    by_default = family != "llama" and not family.startswith(WINDOW_OFF_BY_DEFAULT)
    # Mistral's window is on whatever else its configuration says.
    is_on = by_default if family in READ_NO_LIST else numbers.get("use_sliding_window", by_default)
    if not window or not is_on:
        return []
    layers = numbers.get("num_hidden_layers")
    plain = numbers.get("max_window_layers", FIRST_WINDOWED if family in READ_A_LIST else None)
    if family not in READ_NO_LIST and layers is not None and plain is not None:
        said = f"{layers - plain} of {layers} layers have sliding_window={window}"
        return [(window, said)] if plain < layers else []
    return [(window, f"layers have sliding_window={window}")]


def _listed_types(numbers: Numbers) -> list[str]:
    """Layers of other types; those with a window stand by themselves, if it has a size."""
    types = _types(numbers)
    counts = Counter(kind for kind in types if kind not in PLAIN_TYPES)
    return [
        f"{count} of {len(types)} layers are {kind}"
        for kind, count in counts.items()
        if not _size(numbers, kind)
    ]


def _size(numbers: Numbers, kind: str) -> int | None:
    """The window of layers of this type; None where they have none, or transformers does not read it."""
    if numbers.get("model_type") in READ_A_LIST and not (
        kind == "sliding_attention" and numbers.get("use_sliding_window")
    ):
        return None
    return numbers.get(WINDOW_KEYS.get(kind, "")) or None


def _types(numbers: Numbers) -> Sequence[str]:
    """The type of every layer; nothing where the family reads no list of them."""
    family = numbers.get("model_type")
    keys = () if family in READ_NO_LIST else ("layer_types",) if family in READ_A_LIST else TYPES_KEYS
    return next((numbers[key] for key in keys if numbers.get(key)), ())


def _mixers(numbers: Numbers) -> list[str]:
    if _types(numbers):
        return []
    return [f"layers have {what} ({key}={numbers[key]})" for key, what in _set(numbers, OTHER_MIXERS)]


def _scores(numbers: Numbers) -> list[str]:
    ignored = NOT_READ.get(str(numbers.get("model_type")))
    found = _set(numbers, OTHER_SCORES)
    return [f"attention has {what} ({key}={numbers[key]})" for key, what in found if key != ignored]


def _mask(numbers: Numbers) -> list[str]:
    is_causal = numbers.get("is_causal") is not False
    return [] if is_causal else ["attention has no causal mask (is_causal=false)"]


def _scale(numbers: Numbers) -> list[str]:
    """A scale other than that of the head dimension."""
    size = _head_dim(numbers)
    if not isinstance(size, int):
        return []
    usual = {"attention_multiplier": size**-0.5, "query_pre_attn_scalar": size}
    given = {key: numbers[key] for key in usual if numbers.get(key) is not None}
    return [
        f"scores are scaled by {key}={value}, not by head_dim={size}"
        for key, value in given.items()
        if not isclose(value, usual[key], rel_tol=SAME_SCALE)
    ]


def _head_dim(numbers: Numbers) -> Any:
    size, heads = numbers.get("head_dim"), numbers.get("num_attention_heads")
    if size is None and isinstance(heads, int) and heads > 0 and numbers.get("hidden_size"):
        return numbers["hidden_size"] // heads
    return size


def _shapes(numbers: Numbers) -> list[str]:
    return _differ(numbers, [key for key in PER_LAYER if isinstance(numbers.get(key), list | tuple)])


def _other_shapes(numbers: Numbers) -> list[str]:
    size = _head_dim(numbers)
    differ = [key for key in OTHER_HEAD_DIMS if numbers.get(key) not in (None, 0, size)]
    return _differ(numbers, [*differ, *(key for key in ("block_configs",) if numbers.get(key))])


def _differ(numbers: Numbers, differ: Sequence[str]) -> list[str]:
    return [f"heads differ from layer to layer ({key}={numbers[key]})" for key in differ]


def _set(numbers: Numbers, known: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of the keys that are known those with a value, each thing they stand for once."""
    found: dict[str, str] = {}
    for key, what in known.items():
        if numbers.get(key):
            found.setdefault(what, key)
    return [(key, what) for what, key in found.items()]


PLAIN_RULES: tuple[Callable[[Numbers], list[str]], ...] = (_listed_types, _mask, _shapes)
RULES = (*PLAIN_RULES, _mixers, _scores, _scale, _other_shapes)
