"""What the page says of one cell beside its row in the table, and of each record behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from msgspec import convert

from analysis.cells.capacity import capacity_label
from analysis.cells.comparison import BASE
from analysis.figures.waterfall import step_ms, waterfall_of
from analysis.frame.load import NodeLink, Record
from analysis.labels import SHARED_CORES, bytes_label, count_label, number_label, status_label
from analysis.metrics.definitions import text_of
from analysis.metrics.recorded import Check
from analysis.page.exchange import exchange_rate
from analysis.page.prediction import prediction_facts
from bench.config import UNKNOWN_HARDWARE
from bench.record import Provenance

MODEL_UTILISATION, HARDWARE_UTILISATION = ("mfu_causal", "mfu_full"), ("hfu_causal", "hfu_full")
EXCHANGE = ("exposed_attention_exchange_share", "attention_exchange_share")
COMMUNICATION = ("exposed_communication_share", "communication_share")
"""Of the traced step of median length."""
CHECK_HEADINGS = ("checked", "against", "tokens", "rows", "steps", "outcome")
NO_PEAK = "unknown: no file of conf/hardware/ names this device"
CHECKPOINTING: Mapping[tuple[bool, str], str] = {
    (True, "cuda"): "on, as by default on GPUs: layers are computed again in backward, so that more fits",
    (False, "cuda"): "off: all activations are kept for backward; on GPUs the default is on",
    (True, "cpu"): "on: layers are computed again in backward; on a CPU the default is off",
    (False, "cpu"): "off, as by default on a CPU: all activations are kept for backward",
}
"""What a training cell does on a device, and why where it is the default."""
NO_LINKS: Mapping[str, NodeLink] = {}
THROTTLED: Mapping[str, str] = {"True": "yes", "False": "no"}


@dataclass(frozen=True, slots=True)
class ShownCheck:
    """One check of a record in a reader's words."""

    what: str
    texts: tuple[str, ...]
    """Those of CHECK_HEADINGS after the first."""
    is_whole: bool
    """Whether it was made, and in all steps that it is about."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record behind a cell, in a reader's words."""

    title: str
    facts: list[tuple[str, str]]
    """Pairs of name and text."""
    blocks: list[tuple[str, ...]]
    """The largest classes of live blocks behind a failed allocation."""
    log_tail: str | None
    checks: list[ShownCheck]
    """Empty where the record does not say."""


def cell_facts(cell: Mapping[Any, Any], *, is_ranked: bool = True) -> list[tuple[str, str]]:
    """Names and texts of what no column of the table shows, without those that are not known.

    No speed-up where nothing is ranked.
    """
    facts = {
        "tokens/s per rank": text_of(cell, "tokens_per_s_per_rank"),
        "tokens/s over the whole window": text_of(cell, "window_tokens_per_s"),
        "MFU (causal / full)": _percents(cell, MODEL_UTILISATION) or _no_peak(cell),
        "HFU (causal / full)": _percents(cell, HARDWARE_UTILISATION),
        "speed-up": _speed_up(cell) if is_ranked else "",
        "strong scaling": _scaling(cell),
        "memory one rank may use": capacity_label(cell),
        "checkpointing": _checkpointing(cell),
        "peak reserved": text_of(cell, "peak_reserved_bytes"),
        f"from ideal attention to the {_step_in_words(cell)}": _waterfall(cell),
        "attention exchange exposed / in flight, worst rank": _percents(cell, EXCHANGE),
        "communication exposed / in flight, worst rank": _percents(cell, COMMUNICATION),
        "communication: range of transfer": _range(cell, "communication_transfer"),
        "communication: range of waiting": _range(cell, "communication_waiting"),
        "straggler gap": _with_unit(text_of(cell, "straggler_gap_ms"), "ms"),
    }
    return [(name, text) for name, text in facts.items() if text]


def _step_in_words(cell: Mapping[Any, Any]) -> str:
    return "expected step" if cell["provenance"] == Provenance.PREDICTED else "traced step"


def _no_peak(cell: Mapping[Any, Any]) -> str:
    return NO_PEAK if cell["hardware"] == UNKNOWN_HARDWARE and pd.notna(cell["step_time_ms"]) else ""


def _checkpointing(cell: Mapping[Any, Any]) -> str:
    """Empty where nothing is trained, or nobody knows."""
    if cell["workload"] != "train" or not isinstance(cell["checkpointing"], bool | np.bool_):
        return ""
    return CHECKPOINTING.get((bool(cell["checkpointing"]), str(cell["cluster.device"])), "")


def _waterfall(cell: Mapping[Any, Any]) -> str:
    """`ideal attention 1.20 ms + packing 0.30 ms + ... = 5.60 ms`, without what took no time."""
    if pd.isna(cell["part_attention_ms"]):
        return ""
    parts = [f"{part.label} {number_label(ms)} ms" for part, ms in waterfall_of(cell) if ms]
    return f"{' + '.join(parts)} = {number_label(step_ms(cell))} ms"


def _percents(cell: Mapping[Any, Any], columns: tuple[str, ...]) -> str:
    """`38.1 % / 61.0 %`, a dash for one that is not known."""
    texts = [text_of(cell, column) for column in columns]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def _range(cell: Mapping[Any, Any], share: str) -> str:
    """`0.1 % to 0.4 %`, of several traced steps."""
    if not cell["traced_steps"] > 1:
        return ""
    return " to ".join(text_of(cell, f"{share}_{end}_share") for end in ("low", "high"))


def _speed_up(cell: Mapping[Any, Any]) -> str:
    """`1.90 times local on 1 rank (cell 0123456789ab)`."""
    return _over_base(cell, "speed_up", BASE, cell["speed_up_base_ranks"], cell["speed_up_base_cell_id"])


def _scaling(cell: Mapping[Any, Any]) -> str:
    """The same over the fewest ranks, with what that is of the ideal."""
    base = (cell["scaling_base_ranks"], cell["scaling_base_cell_id"])
    text = _over_base(cell, "scaling_speed_up", cell["scaling_base_strategy"], *base)
    if not text:
        return ""
    caveat = f"; {SHARED_CORES}" if cell["cluster.device"] == "cpu" else ""
    return f"{text}, efficiency {text_of(cell, 'scaling_efficiency')}{caveat}"


def _over_base(cell: Mapping[Any, Any], column: str, strategy: str, ranks: float | None, cell_id: str) -> str:
    if pd.isna(cell[column]):
        return ""
    where = "" if pd.isna(ranks) else f" on {count_label(int(ranks), 'rank')}"
    return f"{text_of(cell, column)} times {strategy}{where} (cell {cell_id})"


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if text else ""


def attempt(record: Record, links: Mapping[str, NodeLink] = NO_LINKS) -> Attempt:
    """What the page says of one record; `links` are those within a node, by hardware name."""
    failure, ran_nothing = record.get("failure") or {}, record["provenance"] == Provenance.PREDICTED
    where = [
        f"rank {failure['rank']}" if failure.get("rank") is not None else None,
        *(failure.get(key) for key in ("phase", "step_phase")),
    ]
    engagement, losses = record.get("engagement") or {}, (record.get("losses") or {}).get("loss")
    facts = {
        "status": status_label(record["status"]),
        "reason": record["reason"],
        "failed in": ", ".join(filter(None, where)),
        "provenance": record["provenance"],
        "started": record.get("started_at"),
        "took": None if ran_nothing or record.get("wall_s") is None else f"{record['wall_s']:.1f} s",
        "attention modules entered": ", ".join(engagement.get("modules", ())),
        "parity with float64": _parity(record.get("parity")),
        "attention at the measured length": _full_length(record.get("full_length")),
        "loss and gradient norm": None if record.get("checks") else _held(record.get("losses")),
        "tokens x query heads x KV heads in attention, by rank": _shapes(engagement.get("attention_shapes")),
        "bytes sent per step, by purpose and rank": _sent(engagement.get("sent_bytes")),
        "attention exchange against the link": exchange_rate(record, links),
        "packed documents": _documents(record.get("documents")),
        **prediction_facts(record),
        **({} if ran_nothing else _traced(record.get("trace") or {})),
        "loss, first to last step": (
            f"{_number(losses[0], '.4f')} to {_number(losses[-1], '.4f')}" if losses else None
        ),
        **({} if ran_nothing else _memory_facts(record)),
    }
    present = [(name, str(text)) for name, text in facts.items() if text]
    title = f"repeat {record['repeat']}"
    told = convert(record.get("checks") or [], list[Check])
    checks = [_shown(check, record["status"]) for check in told]
    return Attempt(title, present, _largest_blocks(failure), failure.get("log_tail") or None, checks)


def _shown(check: Check, status: str) -> ShownCheck:
    """Of a wrong result the reason above says what was found; what was compared may be right or not."""
    made = "passed" if status == "ok" else "compared"
    if check.below_noise is not None:
        made = f"below noise: {check.below_noise}"
    was_made = check.reason is None or bool(check.steps)
    outcome = "; ".join(filter(None, (made if was_made else "not checked", check.reason)))
    steps = "" if check.steps is None else f"{check.steps:,}"
    of_steps = "" if check.of_steps is None else f" of {check.of_steps:,}"
    rows = "all" if check.rows is None and check.tokens is not None else _count(check.rows)
    texts = (check.against, _count(check.tokens), rows, steps + of_steps, outcome)
    return ShownCheck(check.what, texts, check.reason is None)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _shapes(shapes: Sequence[Sequence[Sequence[int]]] | None) -> str:
    """`4096 x 4 x 2; 4096 x 4 x 2` of two ranks, all shapes of a rank with commas."""
    return "; ".join(", ".join(" x ".join(map(str, each)) for each in rank) for rank in shapes or ())


def _sent(sent: Mapping[str, Sequence[int]] | None) -> str:
    """`attention 1.5 MiB, 1.5 MiB; gradients 24.0 KiB, 24.0 KiB`."""
    return "; ".join(f"{name} {', '.join(map(bytes_label, ranks))}" for name, ranks in (sent or {}).items())


def _documents(section: Mapping[str, Any] | None) -> str | None:
    """`15 to 19 a step; in the median step the busiest rank attends to 1.08 times the mean rank's pairs`."""
    if not section:
        return None
    fewest, most = min(section["documents"]), max(section["documents"])
    share = _number(section["imbalance"], ".2f")
    counts = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return (
        f"{counts} a step; in the median step the busiest rank attends to {share} times the mean rank's pairs"
    )


def _full_length(section: Mapping[str, Any] | None) -> str | None:
    if not section:
        return None
    if section.get("reason"):
        return str(section["reason"])
    known = ((name, error) for name, error in section["errors"].items() if error is not None)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in known)
    sampled = f"{section['rows']} rows and {section.get('keys', 0)} keys"
    return f"{errors or 'no number is finite'} of {sampled} at {section['tokens']:,} tokens"


def _held(losses: Mapping[str, Any] | None) -> str | None:
    """How many steps were compared with which cell; of a record of an older version nothing is known."""
    if not losses or "held_steps" not in losses:
        return None
    steps, other = len(losses["loss"]), losses["held_against"]
    if other is None:
        return f"{steps} steps, held against no other cell"
    return f"{losses['held_steps']} of {steps} steps held against cell {other}"


def _traced(trace: Mapping[str, Any]) -> dict[str, str | None]:
    """What a traced step spent on others, in ms by purpose and rank, and how evenly work was spread."""
    return {
        "not traced": trace.get("failure"),
        "exposed communication, ms by purpose and rank": _times(trace.get("purpose_exposed_ms")),
        "attention's transfer, ms by rank, traced step by traced step": _transfers(trace.get("steps") or ()),
        "waiting for other ranks, ms by purpose and rank": _times(trace.get("purpose_waiting_ms")),
        "waiting unknown": trace.get("waiting_unknown"),
        "compute, ms by part and rank": _times(trace.get("compute_ms")),
        "device copies, ms by part and rank": _times(trace.get("copies_ms")),
        "causal (query, key, head) triples by rank": ", ".join(
            f"{area:,}" for area in trace.get("causal_area") or ()
        ),
        "chosen by torch for attention": ", ".join(trace.get("torch_attention") or ()),
        "purposes unknown": "; ".join(filter(None, trace.get("unjoined", ()))),
    }


def _transfers(steps: Sequence[Mapping[str, Any]]) -> str:
    """`14.4, 12.7; 15.1, 12.9` of two steps on two ranks; a dash for a step without known waiting."""
    return "; ".join(map(_transfer, steps))


def _transfer(step: Mapping[str, Any]) -> str:
    exposed_ms, waiting_ms = step["purpose_exposed_ms"], step["purpose_exposed_waiting_ms"]
    if waiting_ms is None:
        return "-"
    nothing = [0.0] * len(step["step_ms"])
    pairs = zip(exposed_ms.get("attention", nothing), waiting_ms.get("attention", nothing), strict=True)
    return ", ".join(number_label(exposed - waiting) for exposed, waiting in pairs)


def _times(times_ms: Mapping[str, Sequence[float]] | None) -> str | None:
    """`attention 1.23, 4.56; gradients 7.89, 0.12`."""
    if not times_ms:
        return None
    return "; ".join(f"{name} {', '.join(map(number_label, ranks))}" for name, ranks in times_ms.items())


def _parity(parity: Mapping[str, Any] | None) -> str | None:
    """Every tensor's error with its limit, relative to its maximum."""
    if not parity:
        return None
    if parity.get("reason"):
        return f"not compared: {parity['reason']}"
    pairs = (
        f"{name} {_number(error, '.1e')} (limit {_number(parity['limits'][name], '.0e')})"
        for name, error in parity["errors"].items()
    )
    return f"at {parity['tokens']} tokens: {', '.join(pairs)}"


def _number(value: float | None, form: str) -> str:
    """The number as text; null stands for one that JSON does not have."""
    return "not finite" if value is None else format(value, form)


def as_text(value: Any) -> str:
    """A value as a reader would write it: lists with commas, mappings as `name value; name value`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _memory_facts(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Names and texts for one record; None where it does not say."""
    memory, telemetry = record.get("memory") or {}, record.get("telemetry") or {}
    failed = (record.get("failure") or {}).get("out_of_memory") or {}
    load, switches = telemetry.get("load_average"), telemetry.get("involuntary_switches")
    return {
        "asked for when memory ran out": bytes_label(failed.get("requested_bytes")),
        "held by the rank then": bytes_label(failed.get("held_bytes")),
        "memory limit": bytes_label(failed.get("limit_bytes")),
        "steady peak, by rank": _peaks(memory.get("peak_allocated_bytes"), memory.get("peak_phase")),
        "peak over the whole life, by rank": _peaks(
            memory.get("whole_life_allocated_bytes"), memory.get("whole_life_phase")
        ),
        "device memory used": _sizes(memory.get("device_used_bytes")) or memory.get("device_used_reason"),
        "throttled": THROTTLED.get(str(telemetry.get("throttled"))),
        "telemetry": telemetry.get("reason"),
        "load average when timing began": None if load is None else f"{load:.2f}",
        "involuntary context switches while timed, by rank": ", ".join(map(str, switches or ())),
    }


def _largest_blocks(failure: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The classes of live blocks behind a failed allocation: role, dtype, shape, how many, bytes together."""
    return [
        (
            str(block["role"]),
            str(block["dtype"]),
            " x ".join(map(str, block["shape"])) or "scalar",
            f"{block['count']:,}",
            bytes_label(block["total_bytes"]),
        )
        for block in (failure.get("out_of_memory") or {}).get("largest", ())
    ]


def _peaks(sizes: Sequence[int] | None, phases: Sequence[str | None] | None) -> str | None:
    """`27 MiB in backward, 27 MiB in backward`."""
    if not sizes:
        return None
    named = phases or [None] * len(sizes)
    return ", ".join(
        f"{bytes_label(size)} in {phase}" if phase else bytes_label(size)
        for size, phase in zip(sizes, named, strict=True)
    )


def _sizes(sizes: Sequence[int] | None) -> str | None:
    return ", ".join(map(bytes_label, sizes)) if sizes else None
