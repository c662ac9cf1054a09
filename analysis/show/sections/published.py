"""The sections of `experiment=published_memory` and `published_throughput`: verdicts on published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import isinf

from analysis.answers.published_post import (
    PEAKS_GB,
    POST,
    REVISIONS,
    Published,
    Row,
    differences,
    known_numbers,
    peaks_gib,
    rates,
)
from analysis.read.metrics import text_of
from analysis.show.columns import (
    LENGTH,
    NAME,
    RANKS,
    STATUS,
    STRATEGY,
    is_predicted,
    predicted_band,
    speed_text,
    with_band,
)
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import GIB, LENGTH_UNITS

SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are given for."""
SAME_AS_BASE = ("provenance", "trainer", "kernel", "offload.optimizer")
"""Settings that a cell and its base on one GPU have in common."""
DISPENSABLE = ("device", "ranks/sp", "status", "to the base")
"""Columns that a narrow terminal does without, in this order."""
READING = (
    "A result within {near} % of a published number is as published: people who repeat a run have other"
    " drivers, clocks and data. Beyond {far} % it is {beyond}, and between the two undecided. The distance"
    " after a verdict is what the post's run must have taken more, or less, than this one. The trainer and"
    " the kernel may be others than the post's trl with flash_attn_2. Predicted cells have no verdict, only"
    " the distance from their band. Replayed cells are of one rank on one GPU: their rates go from all of the"
    " modelled link's time exposed to none of it, and a verdict holds at both ends."
)
MEMORY = (
    f"Peaks of the worst rank, compared with {POST}, whose revisions"
    f" {' and '.join(each.name for each in REVISIONS)} print the same and do not say what they count. A"
    " result lies between tensors and all that the device held. The post has its optimizer on the host, but"
    " its 76.4 GB on one GPU hold it. GB are taken as GiB."
)
THROUGHPUT = (
    f"Tokens/s of all GPUs, compared with {POST}, whose revisions A and B differ by 1.7 times at 8k on 4"
    " GPUs."
)


def published_memory(findings: Findings) -> Section | None:
    """Return the peaks of the experiment's cells, and the slopes of the formula and the post."""
    rows = [row for row in findings.shown_rows if row["experiment"] == "published_memory"]
    reading = f"{MEMORY} {_reading(PEAKS_GB, 'more or less memory')}"
    return _section("Published memory", _slopes(rows), Table.of(MEMORY_COLUMNS, rows, DISPENSABLE), reading)


def published_throughput(findings: Findings) -> Section | None:
    """Return tokens per second of the experiment's cells, compared with both revisions of the post."""
    rows = [row for row in findings.shown_rows if row["experiment"] == "published_throughput"]
    bases = {_setting(row): rates(row) for row in rows if row["cluster.world_size"] == 1}

    def to_base(row: Row) -> str:
        own, base = rates(row), bases.get(_setting(row), [])
        return f"{own[0] / base[0]:.2f}x" if len(base) == len(own) == 1 else ""

    columns = (
        *(STRATEGY, LENGTH, RANKS, STATUS),
        Column("tokens/s", speed_text, sorted_by="tokens_per_s"),
        Column("to the base", to_base),
        *(Column(each.name, each.comparison, is_words=True) for each in REVISIONS),
    )
    reading = f"{THROUGHPUT} {_reading(REVISIONS[0], 'faster or slower')}"
    return _section("Published throughput", (), Table.of(columns, rows, DISPENSABLE), reading)


def _section(title: str, lines: Sequence[str], table: Table, reading: str) -> Section | None:
    if not table.rows:
        return None
    return Section(title, lines, table, reading, prints_lines=True, prints_table=True, answers=True)


def _reading(published: Published, beyond: str) -> str:
    near = round(100 * published.tolerance)
    return READING.format(near=near, far=2 * near, beyond=beyond)


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in SAME_AS_BASE)


def _device(row: Row) -> str:
    """Return the memory that the device held, or the predicted need of a rank."""
    return predicted_band(row, "needed{}_bytes") if is_predicted(row) else text_of(row, "device_used_bytes")


def _slopes(rows: Sequence[Row]) -> list[str]:
    """Return the slope of each series on several GPUs of which two lengths or more are known."""
    series: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        peaks, whose = peaks_gib(row), str(row["provenance"]).capitalize()
        if is_predicted(row):
            published, whose = PEAKS_GB.number(row), "Published"
            is_known = published is not None and not isinf(published) and not differences(row, PEAKS_GB)
            peaks = [published] if published is not None and is_known else []
        needed = known_numbers(row, ["needed_bytes"])
        if peaks and needed and row["cluster.world_size"] > 1:
            points = series.setdefault(f"{whose} slope, {row[NAME]}", {})
            points[row["seq_len"]] = peaks[0], needed[0] / GIB
    lines = []
    for label, points in series.items():
        if len(points) > 1:
            sides = zip(*points.values(), strict=True)
            slope, formula = (statistics.linear_regression([*points], gib).slope * SPAN for gib in sides)
            off = f"{formula / slope - 1:+.1%}"
            text = f"{slope:.4g} GiB per 32k tokens; the formula's {formula:.4g} ({off}; nothing fitted)."
            lines.append(f"{label}: {text}")
    return lines


MEMORY_COLUMNS = (
    *(STRATEGY, LENGTH, RANKS, STATUS),
    Column("tensors", lambda row: with_band(row, "peak_allocated{}_bytes"), sorted_by="peak_allocated_bytes"),
    Column("device", _device, sorted_by="device_used_bytes"),
    Column(PEAKS_GB.name, PEAKS_GB.comparison, is_words=True),
)
