"""One record in a reader's words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import convert

from analysis.labels import band_label, bytes_label, number_label, percent_label, status_label
from analysis.read.load import NodeLink, Record
from analysis.read.recorded import Check
from bench.record.record import Provenance

Section = Mapping[str, Any]
CHECK_HEADINGS = ("checked", "against", "tokens", "rows", "steps", "outcome")
BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "together")
NO_LINKS: Mapping[str, NodeLink] = {}
THROTTLED: Mapping[str, str] = {"True": "yes", "False": "no"}
ATTENTION = "attention"
NVLINK = "NVLink"
"""The start of such a link's name, and what a record calls pairs of GPUs that reach one another by it."""
GIGA = 1e9
Pairs = list[tuple[str, str]]
"""Names and texts."""


@dataclass(frozen=True, slots=True)
class ShownCheck:
    """One check of a record in a reader's words."""

    texts: tuple[str, ...]
    """In the order of CHECK_HEADINGS."""
    is_whole: bool
    """Whether it was made, and in all steps that it is about."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record behind a cell, in a reader's words."""

    title: str
    facts: Pairs
    blocks: list[tuple[str, ...]]
    """The largest classes of live blocks behind a failed allocation, in the order of BLOCK_HEADINGS."""
    log_tail: str | None
    checks: list[ShownCheck]
    """Empty where the record does not say."""


def known_facts(facts: Mapping[str, Any]) -> Pairs:
    """Names and texts of what is known."""
    return [(name, str(text)) for name, text in facts.items() if text]


def attempt(record: Record, links: Mapping[str, NodeLink] = NO_LINKS) -> Attempt:
    """What the page says of one record; `links` are those within a node, by hardware name."""
    failure, has_run = record.get("failure") or {}, record["provenance"] != Provenance.PREDICTED
    rank = None if failure.get("rank") is None else f"rank {failure['rank']}"
    engagement, losses = record.get("engagement") or {}, (record.get("losses") or {}).get("loss")
    facts = {
        "status": status_label(record["status"]),
        "reason": record["reason"],
        "failed in": ", ".join(filter(None, (rank, failure.get("phase"), failure.get("step_phase")))),
        "provenance": record["provenance"],
        "started": record.get("started_at"),
        "took": f"{record['wall_s']:.1f} s" if has_run and record.get("wall_s") is not None else "",
        "attention modules entered": ", ".join(engagement.get("modules", ())),
        "parity with float64": _parity(record.get("parity")),
        "attention at the measured length": _full_length(record.get("full_length")),
        "tokens x query heads x KV heads in attention, by rank": _shapes(engagement.get("attention_shapes")),
        "bytes sent per step, by purpose and rank": _by_rank(engagement.get("sent_bytes"), bytes_label),
        "attention exchange against the link": exchange_rate(record, links),
        "packed documents": _documents(record.get("documents")),
        **_replayed(record),
        **_predicted((record.get("analytic") or {}).get("prediction")),
        **(_traced(record.get("trace") or {}) if has_run else {}),
        "loss, first to last step": (
            f"{_number(losses[0], '.4f')} to {_number(losses[-1], '.4f')}" if losses else ""
        ),
        **(_memory(record) if has_run else {}),
    }
    told = convert(record.get("checks") or [], list[Check])
    checks = [_shown(check, record["status"]) for check in told]
    blocks = _largest_blocks((failure.get("out_of_memory") or {}).get("largest", ()))
    return Attempt(
        f"repeat {record['repeat']}", known_facts(facts), blocks, failure.get("log_tail") or None, checks
    )


def _replayed(record: Record) -> Section:
    """Which rank ran, and the link's time by purpose; nothing of a record that is no replay."""
    config, link_ms = record["config"], (record.get("analytic") or {}).get("link_ms")
    if record["provenance"] != Provenance.REPLAYED:
        return {}
    bands = (
        f"{purpose} {band_label(ms['expected'], ms['low'], ms['high'], number_label)} ms"
        for purpose, ms in (link_ms or {}).items()
    )
    return {
        "replayed": f"rank {config['replay.rank']} of {config['cluster.world_size']}; no other rank ran",
        "link time of a step, modelled, none hidden": "; ".join(bands),
    }


def _shown(check: Check, status: str) -> ShownCheck:
    """Of a wrong result the reason above says what was found; what was compared may be right or not."""
    made = "passed" if status == "ok" else "compared"
    if check.below_noise is not None:
        made = f"below noise: {check.below_noise}"
    was_made = check.reason is None or bool(check.steps)
    outcome = "; ".join(filter(None, (made if was_made else "not checked", check.reason)))
    steps = _count(check.steps) + ("" if check.of_steps is None else f" of {check.of_steps:,}")
    rows = "all" if check.rows is None and check.tokens is not None else _count(check.rows)
    texts = (check.what, check.against, _count(check.tokens), rows, steps, outcome)
    return ShownCheck(texts, check.reason is None)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _shapes(shapes: Sequence[Sequence[Sequence[int]]] | None) -> str:
    """`4096 x 4 x 2; 4096 x 4 x 2` of two ranks, all shapes of a rank with commas."""
    return "; ".join(", ".join(" x ".join(map(str, each)) for each in rank) for rank in shapes or ())


def _by_rank(values: Mapping[str, Sequence[float]] | None, label: Any = number_label) -> str:
    """`attention 1.23, 4.56; gradients 7.89, 0.12`: of each purpose the values of all ranks."""
    return "; ".join(f"{name} {', '.join(map(label, ranks))}" for name, ranks in (values or {}).items())


def exchange_rate(record: Record, links: Mapping[str, NodeLink]) -> str | None:
    """`335 GB/s a rank ..., 74.4 % of NVLink 4 (450 GB/s)`; None where bytes, times or the link are unknown.

    Bytes that left all ranks in a step, over the time in which their exchange was in flight and all ranks
    that had to meet were there: the mean rank's rate in one direction. Across hosts waiting is not known, so
    what there is is of one node.
    """
    link = links.get(str(record["config"].get("hardware")))
    if link is None or not _joins_all_ranks(record, link):
        return None
    trace = record.get("trace") or {}
    sent = ((record.get("engagement") or {}).get("sent_bytes") or {}).get(ATTENTION)
    total_ms, waiting_ms = (
        (trace.get(f"purpose_{what}_ms") or {}).get(ATTENTION) for what in ("total", "waiting")
    )
    if not sent or not total_ms or not waiting_ms or sum(total_ms) <= sum(waiting_ms):
        return None
    bytes_per_s = sum(sent) / (sum(total_ms) - sum(waiting_ms)) * 1e3
    rate, best = (number_label(each / GIGA) for each in (bytes_per_s, link.bytes_per_s))
    share = percent_label(bytes_per_s / link.bytes_per_s)
    return f"{rate} GB/s a rank while in flight, waiting left out; {share} of {link.name} ({best} GB/s)"


def _joins_all_ranks(record: Record, link: NodeLink) -> bool:
    """Whether ranks have a device each, and NVLink, where that is the hardware's link, joins all of them."""
    if (record["config"].get("cluster.ranks_per_gpu") or 1) > 1:
        return False
    pairs = (record.get("environment") or {}).get("gpu_p2p") or {}
    return not link.name.startswith(NVLINK) or set(pairs.values()) == {NVLINK}


def _documents(section: Section | None) -> str:
    """`15 to 19 a step; in the median step the busiest rank attends to 1.08 times the mean rank's pairs`."""
    if not section:
        return ""
    fewest, most = min(section["documents"]), max(section["documents"])
    counts = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if section["imbalance"] is None:
        return f"{counts} a step"
    share = _number(section["imbalance"], ".2f")
    return (
        f"{counts} a step; in the median step the busiest rank attends to {share} times the mean rank's pairs"
    )


def _parity(parity: Section | None) -> str:
    """Every tensor's error with its limit, relative to its maximum."""
    if not parity:
        return ""
    if parity.get("reason"):
        return f"not compared: {parity['reason']}"
    limits = {name: _number(limit, ".0e") for name, limit in parity["limits"].items()}
    pairs = (
        f"{name} {_number(error, '.1e')} (limit {limits[name]})" for name, error in parity["errors"].items()
    )
    return f"at {parity['tokens']} tokens: {', '.join(pairs)}"


def _full_length(section: Section | None) -> str:
    if not section:
        return ""
    if section.get("reason"):
        return str(section["reason"])
    known = ((name, error) for name, error in section["errors"].items() if error is not None)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in known)
    sampled = f"{section['rows']} rows and {section.get('keys', 0)} keys"
    return f"{errors or 'no number is finite'} of {sampled} at {section['tokens']:,} tokens"


def _number(value: float | None, form: str) -> str:
    """The number as text; null stands for one that JSON does not have."""
    return "not finite" if value is None else format(value, form)


def _predicted(found: Section | None) -> Mapping[str, str]:
    """The record's prediction: its band, and what the expected step is made of."""
    if not found:
        return {}
    need, usable = _band(found["needed_bytes"], bytes_label), found.get("usable_bytes")
    fit = f" of {bytes_label(usable)}: {str(found.get('fit')).replace('_', ' ')}"
    return {
        "predicted step time, ms": _band(found["step_time_ms"], number_label),
        "predicted step, ms by part": _terms(found.get("parts"), number_label),
        "predicted peak allocated": _band(found["peak_allocated_bytes"], bytes_label),
        "predicted memory by term": _terms(found.get("memory"), bytes_label),
        "predicted need of one rank, and what it may take": need
        + ("; unknown what it may take" if usable is None else fit),
    }


def _band(band: Section, label: Any) -> str:
    return band_label(band["expected"], band["low"], band["high"], label)


def _terms(terms: Section | None, label: Any) -> str:
    """`attention 33.5; other compute 129`, without what is nothing."""
    known = {name: size for name, size in (terms or {}).items() if isinstance(size, int | float) and size}
    return "; ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {label(size)}" for name, size in known.items()
    )


def _traced(trace: Section) -> dict[str, Any]:
    """What a traced step spent on others, in ms by purpose and rank, and how evenly work was spread."""
    return {
        "not traced": trace.get("failure"),
        "exposed communication, ms by purpose and rank": _by_rank(trace.get("purpose_exposed_ms")),
        "attention's transfer, ms by rank, traced step by traced step": "; ".join(
            map(_transfer, trace.get("steps") or ())
        ),
        "waiting for other ranks, ms by purpose and rank": _by_rank(trace.get("purpose_waiting_ms")),
        "waiting unknown": trace.get("waiting_unknown"),
        "compute, ms by part and rank": _by_rank(trace.get("compute_ms")),
        "device copies, ms by part and rank": _by_rank(trace.get("copies_ms")),
        "causal (query, key, head) triples by rank": ", ".join(map(_count, trace.get("causal_area") or ())),
        "chosen by torch for attention": ", ".join(trace.get("torch_attention") or ()),
        "purposes unknown": "; ".join(filter(None, trace.get("unjoined", ()))),
    }


def _transfer(step: Section) -> str:
    """`14.4, 12.7` of two ranks; a dash for a step without known waiting."""
    exposed_ms, waiting_ms = step["purpose_exposed_ms"], step["purpose_exposed_waiting_ms"]
    if waiting_ms is None:
        return "-"
    nothing = [0.0] * len(step["step_ms"])
    pairs = zip(exposed_ms.get("attention", nothing), waiting_ms.get("attention", nothing), strict=True)
    return ", ".join(number_label(exposed - waiting) for exposed, waiting in pairs)


def _memory(record: Section) -> dict[str, Any]:
    """What a rank held and when, and what else the machine did."""
    memory, telemetry = record.get("memory") or {}, record.get("telemetry") or {}
    failed = (record.get("failure") or {}).get("out_of_memory") or {}
    load = telemetry.get("load_average")
    return {
        "asked for when memory ran out": bytes_label(failed.get("requested_bytes")),
        "held by the rank then": bytes_label(failed.get("held_bytes")),
        "memory limit": bytes_label(failed.get("limit_bytes")),
        "steady peak, by rank": _peaks(memory.get("peak_allocated_bytes"), memory.get("peak_phase")),
        "peak over the whole life, by rank": _peaks(
            memory.get("whole_life_allocated_bytes"), memory.get("whole_life_phase")
        ),
        "device memory used": _peaks(memory.get("device_used_bytes")) or memory.get("device_used_reason"),
        "throttled": THROTTLED.get(str(telemetry.get("throttled"))),
        "telemetry": telemetry.get("reason"),
        "load average when timing began": None if load is None else f"{load:.2f}",
        "involuntary context switches while timed, by rank": ", ".join(
            map(str, telemetry.get("involuntary_switches") or ())
        ),
    }


def _peaks(sizes: Sequence[int] | None, phases: Sequence[str | None] | None = None) -> str:
    """`27 MiB in backward, 27 MiB in backward`."""
    named = zip(sizes or (), phases or [None] * len(sizes or ()), strict=True)
    return ", ".join(
        f"{bytes_label(size)} in {phase}" if phase else bytes_label(size) for size, phase in named
    )


def _largest_blocks(largest: Iterable[Section]) -> list[tuple[str, ...]]:
    """Classes of live blocks: role, dtype, shape, how many, bytes together."""
    return [
        (
            str(block["role"]), str(block["dtype"]), " x ".join(map(str, block["shape"])) or "scalar",
            f"{block['count']:,}", bytes_label(block["total_bytes"]),
        )
        for block in largest
    ]  # fmt: skip


def as_text(value: Any) -> str:
    """A value as a reader would write it: lists with commas, mappings as `name value; name value`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value)
