"""Hugging Face's post on Ulysses next to a sweep's records: a row a record, with a verdict on each number."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from analysis.cells.statuses import NO_SPARE, shown_status
from analysis.labels import MISSING, band_label, number_label, status_label
from analysis.published.by_records import fit_verdict, measured_verdict
from analysis.published.claimed import range_label
from analysis.published.comparable import other_settings
from analysis.published.metrics import MEMORY_TOLERANCE, SPEED_TOLERANCE
from analysis.published.opinion import Verdict
from analysis.published.registry import Claim, read_registry
from analysis.published.setup import setup_of
from analysis.tables.rows import markdown_table
from bench.labels import GIB, LENGTH_UNITS, length_label, rate_range_label
from bench.record import Provenance, Status

Row = Mapping[Any, Any]
"""A record's row of the frame."""
POST = "huggingface/blog, `ulysses-sp.md`"
PEAKS = ("hf-ulysses-mem-*", "hf-ulysses-oom-128k")
REVISIONS = {"A": "hf-ulysses-revA-tput-*", "B": "hf-ulysses-revB-tput-*"}
STACK = ("trl", "flash_attn_2")
"""Trainer and kernel of the post."""
POINT = ("strategy", "cluster.world_size", "sp_degree", "dp_shard", "seq_len")
"""Settings in which the post's own cells differ."""
SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are given for."""
NAMED = ("length", "ranks", "strategy", "trainer", "kernel", "optimizer on", "provenance")
READING = """
- A result within {near} % of a published number is as published: people who repeat a run have other
  drivers, clocks and data. Beyond {far} % it is {beyond}, and between the two undecided.
- The distance after a verdict is what the post's run must have taken more, or less, than this one.
- The trainer and the kernel may be others than the post's trl with flash_attn_2; the row names them.
- Predicted rows have no verdict, only the distance from their band. Replayed rows are of one rank on one GPU:
  their rates go from all of the modelled link's time exposed to none of it, and a verdict holds at both ends.
"""
MEMORY = """# Published memory

Peaks of the worst rank, compared with {post}, whose revisions {revisions}
print the same and do not say what they count. A result lies between tensors and all that the device held.
The post has its optimizer on the host, but its 76.4 GB on one GPU hold it. GB are taken as GiB.
"""
THROUGHPUT = """# Published throughput

Tokens/s of all GPUs, compared with {post}, whose revisions A and B differ by
1.7 times at 8k on 4 GPUs.
"""


def post_table(experiment: str, frame: pd.DataFrame) -> str:
    """Return the table of an experiment, and why cells are missing in it, as Markdown."""
    rows: list[Row] = sorted(frame.to_dict("records"), key=_sort_key)
    reasons = [
        f"- {' '.join(_names(row))}: {row['reason']}" for row in rows if isinstance(row["reason"], str)
    ]
    return "\n".join([TEXTS[experiment](rows), *reasons]).rstrip() + "\n"


def _sort_key(row: Row) -> tuple[Any, ...]:
    """Return the order: the post's own trainer and kernel, then the others, each by length."""
    is_other = [row[key] != own for key, own in zip(("trainer", "kernel"), STACK, strict=True)]
    order = ("trainer", "kernel", "offload.optimizer", "seq_len", "cluster.world_size")
    return (*is_other, *(row[key] for key in order))


def _names(row: Row) -> tuple[str, ...]:
    words = [str(row[key]) for key in ("cluster.world_size", "strategy", "trainer", "kernel")]
    place = "host" if row["offload.optimizer"] else "device"
    return length_label(row["seq_len"]), *words, place, str(row["provenance"])


def _reading(tolerance: float, beyond: str) -> str:
    near = round(100 * tolerance)
    return READING.format(near=near, far=2 * near, beyond=beyond)


def memory_text(rows: Sequence[Row]) -> str:
    """Return the peaks by length and place of the optimizer, then the slopes of the formula and the post."""
    claims = _claims(*PEAKS)
    heads = (*NAMED, "status", "tensors, GiB", "device, GiB", "published, GB")
    head = MEMORY.format(post=POST, revisions=" and ".join(map(_revision, REVISIONS)))
    head += _reading(MEMORY_TOLERANCE, "more or less memory")
    return "\n".join(
        [head, markdown_table(heads, [_memory_row(row, claims) for row in rows]), *_slopes(rows, claims)]
    )


def _memory_row(row: Row, claims: Sequence[Claim]) -> tuple[str, ...]:
    peaks = _peaks_gib(row)
    return (
        *_names(row),
        status_label(shown_status(row)),
        _size(row, "peak_allocated", "peak_allocated_bytes"),
        _size(row, "needed", "device_used_bytes"),
        _comparison(row, claims, peaks, lambda published, peak: published - peak, "GiB"),
    )


def _peaks_gib(row: Row) -> list[float]:
    """Return tensors of the worst rank and all that a device held, or both ends of predicted tensors."""
    columns = ["peak_allocated_bytes", "device_used_bytes"]
    if row["provenance"] == Provenance.PREDICTED:
        columns = ["predicted_peak_allocated_low_bytes", "predicted_peak_allocated_high_bytes"]
    return [size / GIB for size in _numbers(row, columns)]


def _numbers(row: Row, columns: Sequence[str]) -> list[float]:
    """Return the row's numbers of these columns that are there."""
    return [*pd.Series([row[column] for column in columns], dtype=float).dropna()]


def _size(row: Row, predicted: str, measured: str) -> str:
    """Return gibibytes, with the band where they are predicted."""
    if row["provenance"] != Provenance.PREDICTED:
        return "".join(f"{size / GIB:.{1 if size > GIB else 4}f}" for size in _numbers(row, [measured]))
    expected, low, high = (row[f"predicted_{predicted}{end}_bytes"] for end in ("", "_low", "_high"))
    return band_label(expected, low, high, lambda size: "" if pd.isna(size) else f"{(size or 0) / GIB:.1f}")


def _slopes(rows: Sequence[Row], claims: Sequence[Claim]) -> list[str]:
    """Return the slope of each kind of cells that share sequences, where two lengths or more are known."""
    kinds: dict[tuple[str, ...], dict[int, tuple[float, float]]] = {}
    for row in rows:
        *_, trainer, kernel, place, provenance = _names(row)
        peaks, what = _peaks_gib(row), provenance.capitalize()
        if provenance == Provenance.PREDICTED:
            claim, what = _claim_at(row, claims), "Published"
            peaks = (
                [] if claim is None or _is_out(claim) or _differences(row, claim) else [float(claim.value)]
            )
        needed = _numbers(row, ["needed_bytes"])
        if peaks and needed and row["cluster.world_size"] > 1:
            points = kinds.setdefault((what, trainer, kernel, place), {})
            points[row["seq_len"]] = peaks[0], needed[0] / GIB
    return [
        _slope(kind, [*points], *zip(*points.values(), strict=True))
        for kind, points in kinds.items()
        if len(points) > 1
    ]


def _slope(kind: tuple[str, ...], lengths: Sequence[int], *sides: Sequence[float]) -> str:
    slope, formula = (statistics.linear_regression(lengths, gib).slope * SPAN for gib in sides)
    what, trainer, kernel, place = kind
    return (
        f"- {what} slope, {trainer} with {kernel}, optimizer on the {place}: {slope:.4g} GiB per 32k"
        f" tokens; the formula's {formula:.4g} ({formula / slope - 1:+.1%}; nothing fitted)."
    )


def throughput_text(rows: Sequence[Row]) -> str:
    """Return tokens per second of the job and of each GPU, compared with both revisions of the post."""
    heads = (*NAMED, "tokens/s", "per GPU", "to the base", *map(_revision, REVISIONS))
    head = THROUGHPUT.format(post=POST) + _reading(SPEED_TOLERANCE, "faster or slower")
    revisions = [_claims(pattern) for pattern in REVISIONS.values()]
    bases = {_kind(row): _rates(row) for row in rows if row["cluster.world_size"] == 1}
    table = markdown_table(
        heads, [_throughput_row(row, bases.get(_kind(row), []), revisions) for row in rows]
    )
    return f"{head}\n{table}"


def _kind(row: Row) -> tuple[Any, ...]:
    """Return the settings that a cell and its base have in common."""
    return tuple(row[key] for key in ("provenance", "trainer", "kernel", "offload.optimizer"))


def _rates(row: Row) -> list[float]:
    """Return tokens/s of the job: one number, or both ends of a replay or a prediction."""
    columns = {
        Provenance.PREDICTED: ["predicted_tokens_per_s_low", "predicted_tokens_per_s_high"],
        Provenance.REPLAYED: ["tokens_per_s_with_link", "tokens_per_s"],
    }.get(row["provenance"], ["tokens_per_s"])
    return _numbers(row, columns)


def _throughput_row(row: Row, base: Sequence[float], revisions: Sequence[Sequence[Claim]]) -> tuple[str, ...]:
    rates, tokens = _rates(row), row["tokens_per_step"]

    def more_s(published: float, rate: float) -> float:
        return float((tokens / published - tokens / rate) / row["grad_accum"])

    return (
        *_names(row),
        *(_rate_label(row, rates, ranks) for ranks in (1, row["cluster.world_size"])),
        f"{rates[0] / base[0]:.2f}x" if len(base) == len(rates) == 1 else MISSING,
        *(_comparison(row, claims, rates, more_s, "s a micro-step") for claims in revisions),
    )


def _rate_label(row: Row, rates: Sequence[float], ranks: int) -> str:
    """Return tokens/s over these ranks, with both ends where they are not one number."""
    if not rates:
        return MISSING
    low, high = rates[0] / ranks, rates[-1] / ranks
    if row["provenance"] != Provenance.PREDICTED:
        return rate_range_label(low, high)
    return band_label(row["predicted_tokens_per_s"] / ranks, low, high, number_label)


def _comparison(
    row: Row,
    claims: Sequence[Claim],
    ours: Sequence[float],
    more: Callable[[float, float], float],
    unit: str,
) -> str:
    """Return the published number of the row's cell, the verdict on it and its distance from ours."""
    claim = _claim_at(row, claims)
    others = _differences(row, claim or claims[-1], but=() if claim else POINT)
    if others:
        return f"{Verdict.NOT_COMPARABLE}: {', '.join(others)}"
    if claim is None:
        return "nothing published"
    number = "OOM" if _is_out(claim) else number_label(float(claim.value))
    text = f"{number}: {_verdict(row, claim, ours)}"
    if _is_out(claim) or not ours:
        return text
    low, high = sorted(more(float(claim.value), each) for each in (ours[0], ours[-1]))
    if low < 0 < high:
        return f"{text}; {number_label(-low)} {unit} less to {number_label(high)} more than ours"
    ends = range_label(*sorted((abs(low), abs(high))))
    return f"{text}; {ends} {unit} {'less' if low < 0 else 'more'} than ours"


def _verdict(row: Row, claim: Claim, ours: Sequence[float]) -> str:
    status, is_claimed_out = shown_status(row), _is_out(claim)
    if row["provenance"] == Provenance.PREDICTED:
        return "predicted"
    if status == NO_SPARE and is_claimed_out:
        return Verdict.UNDECIDED
    if status == Status.OUT_OF_MEMORY or (is_claimed_out and status == Status.OK):
        return fit_verdict(is_claimed_out=is_claimed_out, ran_out=status == Status.OUT_OF_MEMORY)
    if not ours:
        return status_label(status)
    if row["provenance"] == Provenance.MEASURED or claim.metric == "peak_mem_gb":
        return measured_verdict(claim, ours)
    ends = {measured_verdict(claim, [each]) for each in ours}
    return ends.pop() if len(ends) == 1 else Verdict.UNDECIDED


def _claims(*patterns: str) -> list[Claim]:
    every = read_registry().claims
    return [claim for claim in every if any(fnmatchcase(claim.id, pattern) for pattern in patterns)]


def _claim_at(row: Row, claims: Sequence[Claim]) -> Claim | None:
    point = row["cluster.world_size"], row["seq_len"]
    return next((claim for claim in claims if (claim.hardware.count, claim.seq_len) == point), None)


def _is_out(claim: Claim) -> bool:
    return claim.metric == "oom"


def _differences(row: Row, claim: Claim, but: Sequence[str] = ()) -> list[str]:
    """Return settings in which the cell is not the claim's; the post contradicts itself on the optimizer."""
    return other_settings(row, setup_of(claim, read_registry()), but=("offload.optimizer", *but))


def _revision(name: str) -> str:
    """Return `A (01d33d5c)`, with the first digits of the commit."""
    return f"{name} ({str(_claims(REVISIONS[name])[0].source.revision)[:8]})"


TEXTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "published_memory": memory_text,
    "published_throughput": throughput_text,
}
