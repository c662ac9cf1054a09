"""One record in a reader's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from analysis.labels import band_label, bytes_label, number_label, percent_label, status_label
from analysis.read.hardware import NodeLink
from analysis.show.section import Column, Table
from bench.cost.band import Band
from bench.measure.check import Check
from bench.measure.documents.section import DocumentsSection
from bench.measure.full_length.section import FullLengthSection
from bench.measure.memory.section import BlockClass, MemorySection
from bench.measure.parity.section import ParitySection
from bench.measure.trace.section import TraceSection
from bench.record.analytic import PredictedStep
from bench.record.record import Provenance, Record, Status

CHECK_HEADINGS = ("checked", "against", "tokens", "rows", "steps", "outcome")
NUMBERS = frozenset({"tokens", "rows", "steps", "blocks", "together"})
BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "together")
ATTENTION = "attention"
NVLINK = "NVLink"
"""The start of such a link's name, and what a record calls pairs of GPUs that reach one another by it."""
GIGA = 1e9
Pairs = list[tuple[str, str]]
"""Names and texts."""
Facts = Mapping[str, str | None]
"""Texts by name; a fact that is not known is empty or None."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record behind a cell, in a reader's words."""

    title: str
    facts: Pairs
    blocks: Table
    """The largest classes of live blocks behind a failed allocation."""
    log_tail: str | None
    checks: Table
    """Checks with their outcomes; without rows where the record has none."""


def attempt(record: Record, links: Mapping[str, NodeLink] | None = None) -> Attempt:
    """Return what the page says of one record; `links` are those within a node, by hardware name."""
    failure, has_run = record.failure, record.provenance is not Provenance.PREDICTED
    out_of_memory = None if failure is None else failure.out_of_memory
    facts = {
        **_end(record),
        **_engagement(record, links or {}),
        **(_replayed(record) if record.provenance is Provenance.REPLAYED else {}),
        **(_predicted(record.analytic.prediction) if record.analytic.prediction else {}),
        **(_traced(record.trace) if has_run and record.trace else {}),
        "loss, first to last step": _losses(record),
        **(_machine(record) if has_run else {}),
    }
    return Attempt(
        f"repeat {record.repeat}",
        [(name, text) for name, text in facts.items() if text],
        _table(BLOCK_HEADINGS, [] if out_of_memory is None else [*map(_block, out_of_memory.largest)]),
        None if failure is None else failure.log_tail or None,
        _table(CHECK_HEADINGS, [_check(check, record.status) for check in record.checks or ()]),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table([Column(heading, str, is_words=heading not in NUMBERS) for heading in headings], rows)


def _end(record: Record) -> Facts:
    """Return how the record's cell ended."""
    failure, place = record.failure, ""
    if failure is not None:
        rank = None if failure.rank is None else f"rank {failure.rank}"
        place = ", ".join(filter(None, (rank, failure.phase, failure.step_phase)))
    has_run = record.provenance is not Provenance.PREDICTED
    return {
        "status": status_label(record.status),
        "reason": record.reason,
        "failed in": place,
        "provenance": record.provenance,
        "started": record.started_at,
        "took": f"{record.wall_s:.1f} s" if has_run else "",
    }


def _engagement(record: Record, links: Mapping[str, NodeLink]) -> Facts:
    """Return what entered attention, how near its results are to float64 and what it sent."""
    engagement = record.engagement
    modules = () if engagement is None else engagement.modules
    shapes = () if engagement is None else engagement.attention_shapes
    sent_bytes: Mapping[str, Sequence[float]] = {} if engagement is None else engagement.sent_bytes
    return {
        "attention modules entered": ", ".join(modules),
        "parity with float64": _parity(record.parity),
        "attention at the measured length": _full_length(record.full_length),
        "tokens x query heads x KV heads in attention, by rank": "; ".join(
            ", ".join(" x ".join(map(str, each)) for each in rank) for rank in shapes
        ),
        "bytes sent per step, by purpose and rank": _by_rank(sent_bytes, bytes_label),
        "attention exchange against the link": exchange_rate(record, links),
        "packed documents": _documents(record.documents),
    }


def _losses(record: Record) -> str:
    losses = [] if record.losses is None else record.losses.loss
    return " to ".join(_number(loss, ".4f") for loss in (losses[0], losses[-1])) if losses else ""


def _replayed(record: Record) -> Facts:
    """Return which rank ran, and the link's time by purpose."""
    config = record.config
    bands = (
        f"{purpose} {_band(band, number_label)} ms"
        for purpose, band in (record.analytic.link_ms or {}).items()
    )
    return {
        "replayed": f"rank {config['replay.rank']} of {config['cluster.world_size']}; no other rank ran",
        "link time of a step, modelled, none hidden": "; ".join(bands),
    }


def _check(check: Check, status: Status) -> tuple[str, ...]:
    """Return a check by CHECK_HEADINGS; of a wrong result, what was compared may be right or not."""
    made = "passed" if status is Status.OK else "compared"
    if check.below_noise is not None:
        made = f"below noise: {check.below_noise}"
    was_made = check.reason is None or bool(check.steps)
    outcome = "; ".join(filter(None, (made if was_made else "not checked", check.reason)))
    steps = _count(check.steps) + ("" if check.of_steps is None else f" of {check.of_steps:,}")
    rows = "all" if check.rows is None and check.tokens is not None else _count(check.rows)
    return check.what, check.against, _count(check.tokens), rows, steps, outcome


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _by_rank(
    values: Mapping[str, Sequence[float]] | None, label: Callable[[float], str] = number_label
) -> str:
    """`attention 1.23, 4.56; gradients 7.89, 0.12`: of each purpose the values of all ranks."""
    return "; ".join(f"{name} {', '.join(map(label, ranks))}" for name, ranks in (values or {}).items())


def exchange_rate(record: Record, links: Mapping[str, NodeLink]) -> str | None:
    """`335 GB/s a rank ..., 74.4 % of NVLink 4 (450 GB/s)`; None where bytes, times or the link are unknown.

    Bytes that left all ranks in a step, over the time in which their exchange was in flight and all ranks
    that had to meet were there: the mean rank's rate in one direction. Across hosts waiting is not known, so
    what there is is of one node.
    """
    link, trace, engagement = links.get(str(record.config.get("hardware"))), record.trace, record.engagement
    if link is None or trace is None or engagement is None or not _joins_all_ranks(record, link):
        return None
    sent, total_ms = engagement.sent_bytes.get(ATTENTION), trace.purpose_total_ms.get(ATTENTION)
    waiting_ms = (trace.purpose_waiting_ms or {}).get(ATTENTION)
    if not sent or not total_ms or not waiting_ms or sum(total_ms) <= sum(waiting_ms):
        return None
    bytes_per_s = sum(sent) / (sum(total_ms) - sum(waiting_ms)) * 1e3
    rate, best = (number_label(each / GIGA) for each in (bytes_per_s, link.bytes_per_s))
    share = percent_label(bytes_per_s / link.bytes_per_s)
    return f"{rate} GB/s a rank while in flight, waiting left out; {share} of {link.name} ({best} GB/s)"


def _joins_all_ranks(record: Record, link: NodeLink) -> bool:
    """Whether ranks have a device each, and NVLink, where that is the hardware's link, joins all of them."""
    if (record.config.get("cluster.ranks_per_gpu") or 1) > 1:
        return False
    pairs = record.environment.gpu_p2p or {}
    return not link.name.startswith(NVLINK) or set(pairs.values()) == {NVLINK}


def _documents(section: DocumentsSection | None) -> str:
    """`15 to 19 a step; the busiest rank attends to 1.08 times the mean rank's pairs`, in the median step."""
    if section is None:
        return ""
    fewest, most = min(section.documents), max(section.documents)
    counts = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if section.imbalance is None:
        return f"{counts} a step"
    return f"{counts} a step; the busiest rank attends to {section.imbalance:.2f} times the mean rank's pairs"


def _parity(parity: ParitySection | None) -> str:
    """Return every tensor's error with its limit, relative to its maximum."""
    if parity is None:
        return ""
    if parity.reason:
        return f"not compared: {parity.reason}"
    pairs = (
        f"{name} {_number(error, '.1e')} (limit {_number(parity.limits[name], '.0e')})"
        for name, error in parity.errors.items()
    )
    return f"at {parity.tokens} tokens: {', '.join(pairs)}"


def _full_length(section: FullLengthSection | None) -> str:
    if section is None:
        return ""
    if section.reason:
        return section.reason
    errors = ", ".join(f"{name} {error:.1e}" for name, error in section.errors.items() if error is not None)
    sampled = f"{section.rows} rows and {section.keys} keys"
    return f"{errors or 'no number is finite'} of {sampled} at {section.tokens:,} tokens"


def _number(value: float | None, form: str) -> str:
    """The number as text; null stands for one that JSON does not have."""
    return "not finite" if value is None else format(value, form)


def _predicted(found: PredictedStep) -> Facts:
    """Return the record's prediction: its band, and what the expected step is made of."""
    return {
        "predicted step time, ms": _band(found.step_time_ms, number_label),
        "predicted step, ms by part": _terms(found.parts, number_label),
        "predicted peak allocated": _band(found.peak_allocated_bytes, bytes_label),
        "predicted memory by term": _terms(found.memory, bytes_label),
        "predicted need of one rank": _band(found.needed_bytes, bytes_label),
        "memory that one rank may take": bytes_label(found.usable_bytes),
        "predicted verdict on memory": str(found.fit or "").replace("_", " "),
    }


def _band(band: Band, label: Callable[[float | None], str]) -> str:
    return band_label(band.expected, band.low, band.high, label)


def _terms(terms: Mapping[str, float], label: Callable[[float], str]) -> str:
    """`attention 33.5; other compute 129`, without what is nothing."""
    known = {name.removesuffix("_ms").replace("_", " "): size for name, size in terms.items() if size}
    return "; ".join(f"{name} {label(size)}" for name, size in known.items())


def _traced(trace: TraceSection) -> Facts:
    """Return what a traced step spent on communication, and how evenly work was spread."""
    return {
        "not traced": trace.failure,
        "exposed communication, ms by purpose and rank": _by_rank(trace.purpose_exposed_ms),
        "waiting for other ranks, ms by purpose and rank": _by_rank(trace.purpose_waiting_ms),
        "waiting unknown": trace.waiting_unknown,
        "compute, ms by part and rank": _by_rank(trace.compute_ms),
        "device copies, ms by part and rank": _by_rank(trace.copies_ms),
        "causal (query, key, head) triples by rank": ", ".join(map(_count, trace.causal_area or ())),
        "chosen by torch for attention": ", ".join(trace.torch_attention or ()),
        "purposes unknown": "; ".join(filter(None, trace.purposes_unknown)),
    }


def _machine(record: Record) -> Facts:
    """Return what a rank held and when, and what else the machine did."""
    telemetry, failed = record.telemetry, None if record.failure is None else record.failure.out_of_memory
    facts: dict[str, str | None] = {}
    if failed is not None:
        facts = {
            "asked for when memory ran out": bytes_label(failed.requested_bytes),
            "held by the rank then": bytes_label(failed.allocated_bytes),
            "memory limit": bytes_label(failed.limit_bytes),
        }
    if record.memory is not None:
        facts |= _memory(record.memory)
    if telemetry is not None:
        facts |= {
            "throttled": None if telemetry.throttled is None else "yes" if telemetry.throttled else "no",
            "telemetry": telemetry.reason,
            "load average when timing began": f"{telemetry.load_average:.2f}",
            "involuntary context switches while timed, by rank": ", ".join(
                map(str, telemetry.involuntary_context_switches)
            ),
        }
    return facts


def _memory(memory: MemorySection) -> Facts:
    return {
        "steady peak, by rank": _peaks(memory.peak_allocated_bytes, memory.peak_phase),
        "peak over the whole life, by rank": _peaks(
            memory.whole_life_allocated_bytes, memory.whole_life_phase
        ),
        "device memory used": _peaks(memory.device_used_bytes) or memory.device_used_reason,
    }


def _peaks(sizes: Sequence[float] | None, phases: Sequence[str] | None = None) -> str:
    """`27 MiB in backward, 27 MiB in backward`."""
    named = zip(sizes or (), phases or [""] * len(sizes or ()), strict=True)
    return ", ".join(
        f"{bytes_label(size)} in {phase}" if phase else bytes_label(size) for size, phase in named
    )


def _block(block: BlockClass) -> tuple[str, ...]:
    """Return a class of live blocks: role, dtype, shape, how many, bytes together."""
    shape = " x ".join(map(str, block.shape)) or "scalar"
    return block.role, block.dtype, shape, f"{block.count:,}", bytes_label(block.total_bytes)
