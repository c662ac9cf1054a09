"""What a line of records.jsonl must be before its numbers are drawn: names, types and signs, nothing more."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bench.record import Provenance, Status

STATUSES = frozenset(map(str, Status))
PROVENANCES = frozenset(map(str, Provenance))


@dataclass(frozen=True, slots=True)
class Rule:
    """What one value must be, in words and as a test. `section` is empty for the record's own values."""

    section: str
    key: str
    says: str
    holds: Callable[[Any], bool]
    is_required: bool = True

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}".lstrip(".")


def flaw(record: Mapping[str, Any]) -> str | None:
    """The first thing wrong with a record, in words; None where its numbers can be used."""
    for name in SECTIONS:
        if not isinstance(record.get(name), dict | None):
            return f"{name} must hold named values"
    for rule in RULES:
        values = record if not rule.section else record.get(rule.section)
        if values is None:
            continue
        if rule.key not in values:
            if rule.is_required:
                return f"lacks {rule.path}"
        elif not rule.holds(values[rule.key]):
            return f"{rule.path} must be {rule.says}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_note(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_positive_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf


def _is_one_of(known: Collection[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in known


def _all(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(holds, value))


def _are_known_amounts(value: Any) -> bool:
    return value is None or _all(lambda each: each is None or _is_amount(each))(value)


def _are_steps(value: Any) -> bool:
    return _all(_all(_is_positive))(value) and len({len(steps) for steps in value}) == 1


RULES = (
    Rule("", "cell_id", "a name", _is_text),
    Rule("", "repeat", "a whole number from 0", _is_count),
    Rule("", "status", f"one of {', '.join(sorted(STATUSES))}", _is_one_of(STATUSES)),
    Rule("", "reason", "text or null", _is_note),
    Rule("", "provenance", f"one of {', '.join(sorted(PROVENANCES))}", _is_one_of(PROVENANCES)),
    Rule("", "wall_s", "seconds from 0", _is_amount, is_required=False),
    Rule("", "config", "named values", lambda value: isinstance(value, dict)),
    Rule("config", "seq_len", "a number of tokens from 1", _is_positive_count),
    Rule("config", "strategy", "a name", _is_text),
    *(
        Rule("config", key, "a whole number from 1", _is_positive_count, is_required=False)
        for key in ("batch", "grad_accum", "sp_degree", "dp_replicate", "dp_shard", "cluster.world_size")
    ),
    Rule("timing", "step_times_ms", "equally many times above 0 for each rank", _are_steps),
    Rule("timing", "window_ms", "a time above 0 for each rank", _all(_is_positive)),
    Rule("timing", "tokens_per_step", "a number of tokens from 1", _is_positive_count),
    Rule("timing", "warmup", "a name", _is_text),
    Rule("trace", "step_ms", "a time above 0 for each rank", _all(_is_positive)),
    Rule("trace", "total_ms", "a time from 0 for each rank", _all(_is_amount)),
    Rule("trace", "exposed_ms", "a time from 0 for each rank", _all(_is_amount)),
    *(
        Rule("memory", f"{peak}_bytes", "bytes of each rank or null", _are_known_amounts, is_required=False)
        for peak in ("peak_allocated", "peak_reserved", "peak_resident", "base_resident")
    ),
    Rule("losses", "loss", "a number for each step", _all(_is_finite), is_required=False),
    *(
        Rule("analytic", key, "a number from 0", _is_amount, is_required=False)
        for key in (
            "model_flops_causal",
            "model_flops_full",
            "hardware_flops_causal",
            "hardware_flops_full",
        )
    ),
)
SECTIONS = ("config", "environment", "analytic", "timing", "trace", "memory", "losses")
