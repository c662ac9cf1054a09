"""What may be asked of CUDA's caching allocator, and what it must say then of itself. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.labels import MIB

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,:\[\]]+?)\s*(?:,|$)")


def _flag(value: str) -> bool:
    return value == "True"


def _mib(value: str) -> int:
    return int(value) * MIB


REPORTED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "graph_capture_record_stream_reuse": ("graph_capture_record_stream_reuse", _flag),
    "max_split_size_mb": ("max_split_size", _mib),
    "pinned_num_register_threads": ("pinned_num_register_threads", int),
    "pinned_use_cuda_host_register": ("pinned_use_cuda_host_register", _flag),
    "release_lock_on_cudamalloc": ("release_lock_on_cudamalloc", _flag),
}
"""By setting the name under which torch reports what it parsed, and the value that it must report."""


def names_of(value: str) -> list[str] | None:
    """The settings that a variable's value holds; None where it is no list of settings with values."""
    settings = _parsed(value)
    return None if settings is None else [name for name, _ in settings]


def without_effect(value: str, reported: Mapping[str, Any]) -> str | None:
    """Why the settings are not shown to be in effect by what the allocator reports; None where they are.

    torch keeps the text that it parsed last, and reports some settings by themselves: a platform may not
    support what the text asks for.
    """
    texts = [reported[name] for name in ALLOCATOR_VARIABLES if name in reported]
    if texts != [value]:
        return f"the allocator reports {texts[0]!r}" if texts else "the allocator reports no settings"
    for name, text in _parsed(value) or ():
        key, parse = REPORTED.get(name, (name, str))
        if name in REPORTED and key in reported and reported[key] != parse(text):
            return f"the allocator reports {key}={reported[key]}"
    return None


def _parsed(value: str) -> list[tuple[str, str]] | None:
    settings, end = [], 0
    while end < len(value):
        match = _SETTING.match(value, end)
        if match is None:
            return None
        settings.append((match[1], match[2]))
        end = match.end()
    return settings or None
