"""Functions that describe one record for the details of a cell."""

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
NUMBER_HEADINGS = frozenset({"tokens", "rows", "steps", "blocks", "total"})
BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "total")
ATTENTION = "attention"
NVLINK = "NVLink"
"""First word of the link's name in conf/hardware, and the name of the link of two GPUs in a record."""
GIGA = 1e9
Pairs = list[tuple[str, str]]
"""Pairs of name and text."""
Facts = Mapping[str, str | None]
"""Texts by name; an unknown fact is empty or None."""


@dataclass(frozen=True, slots=True)
class RecordDetails:
    """Description of one record of a cell."""

    title: str
    facts: Pairs
    blocks: Table
    """Largest classes of live blocks at a failed allocation."""
    log_tail: str | None
    checks: Table
    """Checks with their outcomes; without rows if the record has no checks."""


def record_details(record: Record, links: Mapping[str, NodeLink] | None = None) -> RecordDetails:
    """Return the description of a record; `links` are the links within a node by name of the hardware."""
    failure, has_run = record.failure, record.provenance is not Provenance.PREDICTED
    out_of_memory = None if failure is None else failure.out_of_memory
    facts = {
        **_outcome_facts(record),
        **_attention_facts(record, links or {}),
        **(_replay_facts(record) if record.provenance is Provenance.REPLAYED else {}),
        **(_prediction_facts(record.analytic.prediction) if record.analytic.prediction else {}),
        **(_trace_facts(record.trace) if has_run and record.trace else {}),
        "loss, first to last step": _loss_text(record),
        "gradients at the measured length": _gradient_text(record),
        **(_machine_facts(record) if has_run else {}),
    }
    return RecordDetails(
        f"repeat {record.repeat}",
        [(name, text) for name, text in facts.items() if text],
        _table(BLOCK_HEADINGS, [] if out_of_memory is None else [*map(_block_row, out_of_memory.largest)]),
        None if failure is None else failure.log_tail or None,
        _table(CHECK_HEADINGS, [_check_row(check, record.status) for check in record.checks or ()]),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts, in which columns with NUMBER_HEADINGS are not wrapped."""
    return Table(
        [Column(heading, str, is_words=heading not in NUMBER_HEADINGS) for heading in headings], rows
    )


def _outcome_facts(record: Record) -> Facts:
    """Return status, reason, place of a failure, and times."""
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


def _attention_facts(record: Record, links: Mapping[str, NodeLink]) -> Facts:
    """Return modules and shapes in attention, its errors against float64, and the bytes that were sent."""
    engagement = record.engagement
    modules = () if engagement is None else engagement.modules
    shapes = () if engagement is None else engagement.attention_shapes
    sent_bytes: Mapping[str, Sequence[float]] = {} if engagement is None else engagement.sent_bytes
    return {
        "attention modules entered": ", ".join(modules),
        "parity with float64": _parity_text(record.parity),
        "attention at the measured length": _full_length_text(record.full_length),
        "tokens x query heads x KV heads in attention, by rank": "; ".join(
            ", ".join(" x ".join(map(str, shape)) for shape in rank_shapes) for rank_shapes in shapes
        ),
        "bytes sent per step, by purpose and rank": _rank_texts(sent_bytes, bytes_label),
        "attention communication rate": attention_rate(record, links),
        "packed documents": _documents_text(record.documents),
    }


def _loss_text(record: Record) -> str:
    losses = [] if record.losses is None else record.losses.loss
    return " to ".join(_number(loss, ".4f") for loss in (losses[0], losses[-1])) if losses else ""


def _gradient_text(record: Record) -> str:
    match = None if record.losses is None else record.losses.gradient_match
    if match is None:
        return ""
    difference = f"{_number(match.difference, '.1e')} (limit {match.limit:.0e})"
    return f"of {match.parameters} parameters {match.parameter} is nearest to its limit, with {difference}"


def _replay_facts(record: Record) -> Facts:
    """Return the rank that ran, and the modelled time on the link by purpose."""
    config = record.config
    bands = (
        f"{purpose} {_band_text(band, number_label)} ms"
        for purpose, band in (record.analytic.link_ms or {}).items()
    )
    return {
        "replayed": f"rank {config['replay.rank']} of {config['cluster.world_size']}; no other rank ran",
        "modelled link time of a step, nothing hidden": "; ".join(bands),
    }


def _check_row(check: Check, status: Status) -> tuple[str, ...]:
    """Return the texts of a check in the order of CHECK_HEADINGS.

    In a wrong result no check is called passed, because one of them failed.
    """
    result = "passed" if status is Status.OK else "compared"
    if check.below_noise is not None:
        result = f"below noise: {check.below_noise}"
    was_made = check.reason is None or bool(check.steps)
    outcome = "; ".join(filter(None, (result if was_made else "not checked", check.reason)))
    steps = _count(check.steps) + ("" if check.of_steps is None else f" of {check.of_steps:,}")
    rows = "all" if check.rows is None and check.tokens is not None else _count(check.rows)
    return check.what, check.against, _count(check.tokens), rows, steps, outcome


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _rank_texts(
    values: Mapping[str, Sequence[float]] | None, label: Callable[[float], str] = number_label
) -> str:
    """Return the values of all ranks by name: `attention 1.23, 4.56; gradients 7.89, 0.12`."""
    return "; ".join(f"{name} {', '.join(map(label, ranks))}" for name, ranks in (values or {}).items())


def attention_rate(record: Record, links: Mapping[str, NodeLink]) -> str | None:
    """Return the rate of attention communication: `335 GB/s per rank ..., 74.4 % of NVLink 4 (450 GB/s)`.

    The rate is the mean over ranks in one direction: bytes sent by all ranks in a step over the time in
    flight less the time waiting. Waiting across hosts is unknown, so there is a rate only within one node.

    Returns:
        The text; None if bytes, times or the link are unknown, or the link does not join all ranks.
    """
    link, trace, engagement = links.get(str(record.config.get("hardware"))), record.trace, record.engagement
    if link is None or trace is None or engagement is None or not _link_joins_all_ranks(record, link):
        return None
    sent, total_ms = engagement.sent_bytes.get(ATTENTION), trace.purpose_total_ms.get(ATTENTION)
    waiting_ms = (trace.purpose_waiting_ms or {}).get(ATTENTION)
    if not sent or not total_ms or not waiting_ms or sum(total_ms) <= sum(waiting_ms):
        return None
    bytes_per_s = sum(sent) / (sum(total_ms) - sum(waiting_ms)) * 1e3
    rate, bandwidth = (number_label(value / GIGA) for value in (bytes_per_s, link.bytes_per_s))
    share = percent_label(bytes_per_s / link.bytes_per_s)
    return f"{rate} GB/s per rank while in flight and not waiting, {share} of {link.name} ({bandwidth} GB/s)"


def _link_joins_all_ranks(record: Record, link: NodeLink) -> bool:
    """Whether no ranks share a GPU, and all pairs of GPUs have NVLink if that is the hardware's link."""
    if (record.config.get("cluster.ranks_per_gpu") or 1) > 1:
        return False
    pairs = record.environment.gpu_p2p or {}
    return not link.name.startswith(NVLINK) or set(pairs.values()) == {NVLINK}


def _documents_text(section: DocumentsSection | None) -> str:
    """Return `15 to 19 per step; the busiest rank has 1.08 times the mean rank's query-key pairs`."""
    if section is None:
        return ""
    fewest, most = min(section.documents), max(section.documents)
    counts = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if section.imbalance is None:
        return f"{counts} per step"
    imbalance = f"{section.imbalance:.2f} times the mean rank's query-key pairs"
    return f"{counts} per step; the busiest rank has {imbalance} in the median step"


def _parity_text(parity: ParitySection | None) -> str:
    """Return the error of every tensor, relative to its maximum, and its limit."""
    if parity is None:
        return ""
    if parity.reason:
        return f"not compared: {parity.reason}"
    pairs = (
        f"{name} {_number(error, '.1e')} (limit {_number(parity.limits[name], '.0e')})"
        for name, error in parity.errors.items()
    )
    return f"at {parity.tokens} tokens: {', '.join(pairs)}"


def _full_length_text(section: FullLengthSection | None) -> str:
    if section is None:
        return ""
    if section.reason:
        return section.reason
    errors = ", ".join(f"{name} {error:.1e}" for name, error in section.errors.items() if error is not None)
    sampled = f"{section.rows} rows and {section.keys} keys"
    call = f"of attention call {section.call} at {section.tokens:,} tokens"
    return f"{errors or 'no number is finite'} for {sampled} {call}"


def _number(value: float | None, form: str) -> str:
    """Return a number as text; None stands for NaN or infinity, which JSON cannot store."""
    return "not finite" if value is None else format(value, form)


def _prediction_facts(step: PredictedStep) -> Facts:
    """Return predicted values with their bands, and the parts of the expected step."""
    return {
        "predicted step time, ms": _band_text(step.step_time_ms, number_label),
        "predicted step, ms by part": _terms_text(step.parts, number_label),
        "predicted peak allocated": _band_text(step.peak_allocated_bytes, bytes_label),
        "predicted memory by term": _terms_text(step.memory, bytes_label),
        "predicted need of one rank": _band_text(step.needed_bytes, bytes_label),
        "memory that one rank may take": bytes_label(step.usable_bytes),
        "predicted verdict on memory": str(step.fit or "").replace("_", " "),
    }


def _band_text(band: Band, label: Callable[[float | None], str]) -> str:
    return band_label(band.expected, band.low, band.high, label)


def _terms_text(terms: Mapping[str, float], label: Callable[[float], str]) -> str:
    """Return the terms that are not zero: `attention 33.5; other compute 129`."""
    known = {name.removesuffix("_ms").replace("_", " "): size for name, size in terms.items() if size}
    return "; ".join(f"{name} {label(size)}" for name, size in known.items())


def _trace_facts(trace: TraceSection) -> Facts:
    """Return the times of communication and compute in a traced step, by rank."""
    return {
        "not traced": trace.failure,
        "exposed communication, ms by purpose and rank": _rank_texts(trace.purpose_exposed_ms),
        "waiting for other ranks, ms by purpose and rank": _rank_texts(trace.purpose_waiting_ms),
        "waiting unknown": trace.waiting_unknown,
        "compute, ms by part and rank": _rank_texts(trace.compute_ms),
        "device copies, ms by part and rank": _rank_texts(trace.copies_ms),
        "causal (query, key, head) triples by rank": ", ".join(map(_count, trace.causal_area or ())),
        "attention operators of torch": ", ".join(trace.torch_attention or ()),
        "purposes unknown": "; ".join(filter(None, trace.purposes_unknown)),
    }


def _machine_facts(record: Record) -> Facts:
    """Return memory, throttling and load of the machine, and a failed allocation."""
    telemetry = record.telemetry
    out_of_memory = None if record.failure is None else record.failure.out_of_memory
    facts: dict[str, str | None] = {}
    if out_of_memory is not None:
        facts = {
            "allocation that failed": bytes_label(out_of_memory.requested_bytes),
            "allocated by the rank at that time": bytes_label(out_of_memory.allocated_bytes),
            "memory limit": bytes_label(out_of_memory.limit_bytes),
        }
    if record.memory is not None:
        facts |= _memory_facts(record.memory)
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


def _memory_facts(memory: MemorySection) -> Facts:
    return {
        "peak allocated in steady state, by rank": _peaks_text(
            memory.peak_allocated_bytes, memory.peak_phase
        ),
        "peak allocated in the whole life, by rank": _peaks_text(
            memory.whole_life_allocated_bytes, memory.whole_life_phase
        ),
        "device memory used": _peaks_text(memory.device_used_bytes) or memory.device_used_reason,
    }


def _peaks_text(sizes: Sequence[float] | None, phases: Sequence[str] | None = None) -> str:
    """Return the peak of every rank and its phase: `27 MiB in backward, 27 MiB in backward`."""
    peaks = zip(sizes or (), phases or [""] * len(sizes or ()), strict=True)
    return ", ".join(
        f"{bytes_label(size)} in {phase}" if phase else bytes_label(size) for size, phase in peaks
    )


def _block_row(block: BlockClass) -> tuple[str, ...]:
    """Return the texts of a class of live blocks in the order of BLOCK_HEADINGS."""
    shape = " x ".join(map(str, block.shape)) or "scalar"
    return block.role, block.dtype, shape, f"{block.count:,}", bytes_label(block.total_bytes)
