"""What transformers hands to its attention interface, and what of it a strategy can honour."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bench.ranks.log import RefusedError

WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)
"""Keywords that pass through the interface and change no output of causal attention over whole shards."""

HONOURED: Mapping[str, Callable[[Any, int], bool]] = {
    "dropout": lambda value, _: not value,
    "scaling": lambda value, head_dim: value is None or math.isclose(value, head_dim**-0.5, rel_tol=1e-6),
    "is_causal": lambda value, _: value is not False,
}
"""Keywords whose value decides: given it and the head dimension, whether plain causal attention is meant."""


def refuse_unheard(keywords: Mapping[str, Any], attention_mask: Tensor | None, head_dim: int) -> None:
    """Raises RefusedError for a call that asks for more than causal attention: it would be ignored.

    A keyword that is not known is refused by its name unless it is None: `sliding_window`, `softcap` and
    `s_aux` (attention sinks) are such, and whatever a later transformers passes.
    """
    unheard = [name for name, value in keywords.items() if not _is_plain(name, value, head_dim)]
    if attention_mask is not None:
        unheard.append("attention_mask")
    if unheard:
        said = ", ".join(f"{name}={_shown(keywords.get(name, attention_mask))}" for name in unheard)
        raise RefusedError(
            f"a layer calls attention with {said}: strategies compute plain causal attention and"
            " would ignore it; choose a model whose layers are all full_attention, and no dropout of scores"
        )


def _is_plain(name: str, value: Any, head_dim: int) -> bool:
    honoured = HONOURED.get(name)
    if honoured is not None:
        return honoured(value, head_dim)
    return value is None or name in WITHOUT_EFFECT


def _shown(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
