"""Sections of `experiment=published_memory` and `published_throughput`: comparison with published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import pandas as pd

from analysis.cells.statuses import REPLAY_UNDECIDED, shown_status
from analysis.labels import number_label, status_label
from analysis.read.hardware import device_names
from analysis.read.metrics import metric_text
from analysis.show.columns import (
    LENGTH,
    NAME,
    RANKS,
    STATUS,
    STRATEGY,
    CellRow,
    is_predicted,
    predicted_band,
    speed_text,
    value_with_band,
)
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import GIB, LENGTH_UNITS
from bench.config import NO_FAULT
from bench.record.record import Provenance, Status

POST = "huggingface/blog, ulysses-sp.md"
RAN_OUT = inf
"""Published value of a run that ended out of memory."""
SETTINGS: Mapping[str, str | int | bool] = {
    "workload": "train",
    "model": "qwen3_4b",
    "hardware": "h100_80gb",
    "batch": 1,
    "grad_accum": 8,
    "dtype": "bf16",
    "engine": "zero3",
    "checkpointing": True,
    "loss": "untiled",
    "tiled_mlp": False,
    "offload.activations": False,
}
"""Settings that all runs of the post share, read from its text and from the slope of its memory.

The trainer, the kernel and the place of the optimizer may differ; a row names those that do.
"""
USUAL: Mapping[str, str | int] = {
    "inject_fault": NO_FAULT,
    "cluster.ranks_per_gpu": 1,
    "cluster.memory_limit_gib": 0,
    "engine.leaf": "none",
}
"""Values of cells whose results describe the hardware itself; other cells are not comparable."""
SAME_METHOD = ("deepspeed_ulysses", "ulysses")
AS_PUBLISHED, UNDECIDED, NOT_COMPARABLE = "as published", "undecided", "not comparable"
SPAN = 32 * LENGTH_UNITS["k"]
"""Number of tokens for which slopes are stated."""
SAME_AS_BASE = ("provenance", "trainer", "kernel", "offload.optimizer")
"""Settings that a cell shares with its base on one GPU."""
DISPENSABLE = ("device", "ranks/sp", "status", "over one GPU")
"""Headings of the columns that a narrow terminal leaves out, in this order."""


@dataclass(frozen=True, slots=True)
class PublishedNumbers:
    """Published numbers of one quantity, and the rule by which a cell is compared with them."""

    name: str
    numbers: Mapping[tuple[int, int], float]
    """Published value by number of GPUs and thousands of tokens (1k = 1,024)."""
    tolerance: float
    """Relative difference up to which a result is as published; beyond twice this share it is not."""
    beyond: tuple[str, str]
    """Verdicts on results that lie below and above the published number."""
    bounds: Callable[[CellRow], list[float]]
    """Function that returns the bounds of our number for a row; empty if there is no number."""
    excess: Callable[[CellRow, float, float], float]
    """Function that returns how much more the published run took than ours, in `unit`.

    Its arguments are the row, the published number and our number.
    """
    unit: str
    is_bracket: bool
    """Whether the bounds together are one result. Otherwise a verdict has to hold at every bound."""

    def number(self, row: CellRow) -> float | None:
        """Return the published number for the row; None if none is published."""
        return self.numbers.get((row["cluster.world_size"], row["seq_len"] / LENGTH_UNITS["k"]))

    def comparison(self, row: CellRow) -> str:
        """Return `35.0: as published; 1.20 to 2.30 GiB more than ours`, or why there is no comparison."""
        number, bounds, settings = self.number(row), self.bounds(row), other_settings(row, self)
        if settings:
            return f"{NOT_COMPARABLE}: {', '.join(settings)}"
        if number is None:
            return "nothing published"
        text = f"{'OOM' if isinf(number) else number_label(number)}: {self._verdict(row, number, bounds)}"
        return text if isinf(number) or not bounds else f"{text}; {self._distance(row, number, bounds)}"

    def _distance(self, row: CellRow, number: float, bounds: Sequence[float]) -> str:
        """Return how much more or less the published run took than ours, at both bounds."""
        low, high = sorted(self.excess(row, number, bound) for bound in (bounds[0], bounds[-1]))
        if low < 0 < high:
            return f"{number_label(-low)} {self.unit} less to {number_label(high)} more than ours"
        both = " to ".join(dict.fromkeys(map(number_label, sorted((abs(low), abs(high))))))
        return f"{both} {self.unit} {'less' if low < 0 else 'more'} than ours"

    def _verdict(self, row: CellRow, number: float, bounds: Sequence[float]) -> str:
        """Return `as published`, how the result differs, or the status of a cell without a number."""
        status = shown_status(row)
        if row["provenance"] == Provenance.PREDICTED:
            return "predicted"
        if isinf(number) and status in (REPLAY_UNDECIDED, Status.OK):
            return UNDECIDED if status == REPLAY_UNDECIDED else "ran where the source ran out of memory"
        if status == Status.OUT_OF_MEMORY:
            return "out of memory as published" if isinf(number) else "out of memory where the source ran"
        if isinf(number) or not bounds:
            return status_label(status)
        results = [bounds] if self.is_bracket else [[bound] for bound in bounds]
        verdicts = {self._closeness(number, result) for result in results}
        return verdicts.pop() if len(verdicts) == 1 else UNDECIDED

    def _closeness(self, number: float, bounds: Sequence[float]) -> str:
        """Return the verdict on a result between the smallest and the largest of `bounds`."""
        low, high = min(bounds), max(bounds)
        ratio = max(1.0, number / high, low / number)
        if ratio <= 1 + self.tolerance:
            return AS_PUBLISHED
        return UNDECIDED if ratio <= 1 + 2 * self.tolerance else self.beyond[low > number]


def peaks_gib(row: CellRow) -> list[float]:
    """Return bounds of the peak memory in GiB.

    A measured peak lies between the tensors of the worst rank and all memory used on its device. A predicted
    peak lies in the band of predicted tensors.
    """
    columns = ["peak_allocated_bytes", "device_used_bytes"]
    if row["provenance"] == Provenance.PREDICTED:
        columns = ["predicted_peak_allocated_low_bytes", "predicted_peak_allocated_high_bytes"]
    return [size / GIB for size in known_numbers(row, columns)]


def rates(row: CellRow) -> list[float]:
    """Return tokens/s of all ranks: one number, or the bounds of a replay or a prediction."""
    columns = {
        Provenance.PREDICTED: ["predicted_tokens_per_s_low", "predicted_tokens_per_s_high"],
        Provenance.REPLAYED: ["tokens_per_s_with_link", "tokens_per_s"],
    }.get(row["provenance"], ["tokens_per_s"])
    return known_numbers(row, columns)


def known_numbers(row: CellRow, columns: Sequence[str]) -> list[float]:
    """Return the values of these columns that are not missing."""
    return [*pd.Series([row[column] for column in columns], dtype=float).dropna()]


def _excess_s(row: CellRow, published: float, rate: float) -> float:
    """Return the seconds that a micro-step of the published run took longer than ours; negative if less."""
    tokens = row["tokens_per_step"]
    return float((tokens / published - tokens / rate) / row["grad_accum"])


def other_settings(row: CellRow, published: PublishedNumbers) -> list[str]:
    """Return the settings of a row, as `key=value`, that differ from the runs of the post.

    The device counts as a setting unless the row is predicted.
    """
    expected: dict[str, Any] = {}
    if published.number(row) is not None:
        ranks, strategy = row["cluster.world_size"], row["strategy"]
        methods = SAME_METHOD if ranks > 1 else ("local",)
        expected = {"sp_degree": ranks, "strategy": strategy if strategy in methods else methods[0]}
    usual = {key: value for key, value in USUAL.items() if not pd.isna(row.get(key))}
    expected = {**expected, **SETTINGS, **usual}
    different = {key: row[key] for key, value in expected.items() if row[key] != value}
    settings = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in different.items()
    ]
    names = device_names().get(row["hardware"], ())
    if not settings and row["provenance"] != Provenance.PREDICTED and row["device_name"] not in names:
        return [f"device={row['device_name']}"]
    return settings


PEAKS_GB = PublishedNumbers(
    name="published, GB",
    numbers={(1, 8): 76.4, (4, 8): 23.4, (4, 32): 35.0, (4, 64): 50.5, (4, 96): 66.0, (4, 128): RAN_OUT},
    tolerance=0.05,
    beyond=("less memory than published", "more memory than published"),
    bounds=peaks_gib,
    excess=lambda _, published, peak: published - peak,
    unit="GiB",
    is_bracket=True,
)


def _revision(name: str, numbers: Mapping[tuple[int, int], float]) -> PublishedNumbers:
    """Return the published tokens/s of one revision of the post."""
    return PublishedNumbers(
        name=name,
        numbers=numbers,
        tolerance=0.10,
        beyond=("slower than published", "faster than published"),
        bounds=rates,
        excess=_excess_s,
        unit="s per micro-step",
        is_bracket=False,
    )


REVISIONS = (
    _revision("A (01d33d5c)", {(1, 8): 2436, (4, 8): 2315, (4, 32): 7872, (4, 64): 13396}),
    _revision("B (5feb9948)", {(1, 8): 3633, (4, 8): 3933, (4, 32): 7733, (4, 64): 13396}),
)
"""Tokens/s of all GPUs in two revisions of the post, named by the first digits of their commits."""

READING = (
    "A result within {near} % of a published number is as published, because drivers, clocks and data differ"
    " when a run is repeated. Beyond {far} % it is {beyond}; in between it is undecided. After the verdict"
    " follows how much more or less the published run took than ours. The trainer and the kernel may differ"
    " from the post's trl with flash_attn_2. Predicted cells have no verdict, only the distance from their"
    " band. Replayed cells ran one rank on one GPU: their rates range from all to none of the modelled link's"
    " time exposed, and a verdict holds at both ends."
)
MEMORY = (
    f"Peak memory of the worst rank, compared with {POST}. Its revisions"
    f" {' and '.join(revision.name for revision in REVISIONS)} print the same numbers and do not say what"
    " they count. Our result lies between the memory of tensors and all memory used on the device. The post"
    " offloads the optimizer to the host, but its 76.4 GB on one GPU include the optimizer. GB are taken as"
    " GiB."
)
THROUGHPUT = (
    f"Tokens/s of all GPUs, compared with {POST}. Its revisions A and B differ by a factor of 1.7 at 8k on 4"
    " GPUs."
)


def published_memory_section(findings: Findings) -> Section | None:
    """Return peaks compared with the post, and the slopes of peak memory by length."""
    rows = [row for row in findings.shown_rows if row["experiment"] == "published_memory"]
    reading = f"{MEMORY} {_reading(PEAKS_GB, 'more or less memory')}"
    return _section(
        "Published memory", _slopes(rows), Table.from_items(MEMORY_COLUMNS, rows, DISPENSABLE), reading
    )


def published_throughput_section(findings: Findings) -> Section | None:
    """Return tokens/s compared with both revisions of the post."""
    rows = [row for row in findings.shown_rows if row["experiment"] == "published_throughput"]
    bases = {_base_key(row): rates(row) for row in rows if row["cluster.world_size"] == 1}

    def ratio_to_base(row: CellRow) -> str:
        rate, base_rate = rates(row), bases.get(_base_key(row), [])
        return f"{rate[0] / base_rate[0]:.2f}x" if len(base_rate) == len(rate) == 1 else ""

    columns = (
        *(STRATEGY, LENGTH, RANKS, STATUS),
        Column("tokens/s", speed_text, sorted_by="tokens_per_s"),
        Column("over one GPU", ratio_to_base),
        *(Column(revision.name, revision.comparison, is_words=True) for revision in REVISIONS),
    )
    reading = f"{THROUGHPUT} {_reading(REVISIONS[0], 'faster or slower')}"
    return _section("Published throughput", (), Table.from_items(columns, rows, DISPENSABLE), reading)


def _section(title: str, lines: Sequence[str], table: Table, reading: str) -> Section | None:
    if not table.rows:
        return None
    return Section(title, lines, table, reading, prints_lines=True, prints_table=True, answers=True)


def _reading(published: PublishedNumbers, beyond: str) -> str:
    near = round(100 * published.tolerance)
    return READING.format(near=near, far=2 * near, beyond=beyond)


def _base_key(row: CellRow) -> tuple[object, ...]:
    return tuple(row[key] for key in SAME_AS_BASE)


def _device_text(row: CellRow) -> str:
    """Return the memory used on the device, or the predicted need of a rank."""
    return (
        predicted_band(row, "needed{}_bytes") if is_predicted(row) else metric_text(row, "device_used_bytes")
    )


def _slopes(rows: Sequence[CellRow]) -> list[str]:
    """Return a sentence on the slope of peak memory by length, and by our formula, for every series.

    Series on one GPU or with one length have none.
    """
    series: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        peaks, source = peaks_gib(row), str(row["provenance"]).capitalize()
        if is_predicted(row):
            published, source = PEAKS_GB.number(row), "Published"
            is_known = published is not None and not isinf(published) and not other_settings(row, PEAKS_GB)
            peaks = [published] if published is not None and is_known else []
        needed = known_numbers(row, ["needed_bytes"])
        if peaks and needed and row["cluster.world_size"] > 1:
            points = series.setdefault(f"{source} slope, {row[NAME]}", {})
            points[row["seq_len"]] = peaks[0], needed[0] / GIB
    lines = []
    for label, points in series.items():
        if len(points) > 1:
            sides = zip(*points.values(), strict=True)
            slope, formula = (statistics.linear_regression([*points], gib).slope * SPAN for gib in sides)
            error = f"{formula / slope - 1:+.1%}"
            text = f"{slope:.4g} GiB per 32k tokens; the formula's {formula:.4g} ({error}; nothing fitted)."
            lines.append(f"{label}: {text}")
    return lines


MEMORY_COLUMNS = (
    *(STRATEGY, LENGTH, RANKS, STATUS),
    Column(
        "tensors",
        lambda row: value_with_band(row, "peak_allocated{}_bytes"),
        sorted_by="peak_allocated_bytes",
    ),
    Column("device", _device_text, sorted_by="device_used_bytes"),
    Column(PEAKS_GB.name, PEAKS_GB.comparison, is_words=True),
)
