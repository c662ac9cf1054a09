"""The sections of `experiment=published_memory` and `published_throughput`: verdicts on published numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import pandas as pd

from analysis.cells.statuses import NO_SPARE, shown_status
from analysis.labels import number_label, status_label
from analysis.read.hardware import device_names
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
from bench.config import NO_MISTAKE
from bench.record.record import Provenance, Status

Row = Mapping[Any, Any]
"""A record's row of the frame."""
POST = "huggingface/blog, ulysses-sp.md"
OUT = inf
"""Stands for a published run that ended out of memory."""
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
"""Settings that all of the post's runs share, read from its text and from the slope of its memory. The
trainer, the kernel and the place of the optimizer may differ: a row names those that do."""
USUAL: Mapping[str, str | int] = {
    "inject_fault": NO_MISTAKE,
    "cluster.ranks_per_gpu": 1,
    "cluster.memory_limit_gib": 0,
    "engine.leaf": "none",
}
"""Settings with which a record says something of its hardware."""
SAME_METHOD = ("deepspeed_ulysses", "ulysses")
AS_PUBLISHED, UNDECIDED, NOT_COMPARABLE = "as published", "undecided", "not comparable"
SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are given for."""
SAME_AS_BASE = ("provenance", "trainer", "kernel", "offload.optimizer")
"""Settings that a cell and its base on one GPU have in common."""
DISPENSABLE = ("device", "ranks/sp", "status", "to the base")
"""Columns that a narrow terminal does without, in this order."""


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers of one quantity in the post, and the rule by which a record is compared with them."""

    name: str
    numbers: Mapping[tuple[int, int], float]
    """Value by GPUs and thousands of tokens (1,024 each)."""
    tolerance: float
    """Share by which a result may be off and still be as published; beyond twice as much it is not."""
    beyond: tuple[str, str]
    """Verdicts on results far below and far above the published number."""
    ends: Callable[[Row], list[float]]
    """Function that returns the ends between which a row's own number lies; empty where it has none."""
    more: Callable[[Row, float, float], float]
    """Function that returns how much more the published run took of `unit`, by row, published, own number."""
    unit: str
    is_bracket: bool
    """Whether the ends count as one result; else a verdict has to hold at both."""

    def number(self, row: Row) -> float | None:
        """Return the published number of the row's cell; None where nothing is published."""
        return self.numbers.get((row["cluster.world_size"], row["seq_len"] / LENGTH_UNITS["k"]))

    def comparison(self, row: Row) -> str:
        """Return the published number of the row's cell, the verdict on it and its distance from ours."""
        number, ends, others = self.number(row), self.ends(row), differences(row, self)
        if others:
            return f"{NOT_COMPARABLE}: {', '.join(others)}"
        if number is None:
            return "nothing published"
        text = f"{'OOM' if isinf(number) else number_label(number)}: {self._verdict(row, number, ends)}"
        return text if isinf(number) or not ends else f"{text}; {self._distance(row, number, ends)}"

    def _distance(self, row: Row, number: float, ends: Sequence[float]) -> str:
        low, high = sorted(self.more(row, number, each) for each in (ends[0], ends[-1]))
        if low < 0 < high:
            return f"{number_label(-low)} {self.unit} less to {number_label(high)} more than ours"
        both = " to ".join(dict.fromkeys(map(number_label, sorted((abs(low), abs(high))))))
        return f"{both} {self.unit} {'less' if low < 0 else 'more'} than ours"

    def _verdict(self, row: Row, number: float, ends: Sequence[float]) -> str:
        status = shown_status(row)
        if row["provenance"] == Provenance.PREDICTED:
            return "predicted"
        if isinf(number) and status in (NO_SPARE, Status.OK):
            return UNDECIDED if status == NO_SPARE else "ran where the source ran out of memory"
        if status == Status.OUT_OF_MEMORY:
            return "out of memory as published" if isinf(number) else "out of memory where the source ran"
        if isinf(number) or not ends:
            return status_label(status)
        results = [ends] if self.is_bracket else [[end] for end in ends]
        verdicts = {self._closeness(number, result) for result in results}
        return verdicts.pop() if len(verdicts) == 1 else UNDECIDED

    def _closeness(self, number: float, ends: Sequence[float]) -> str:
        """Return the verdict on a result between the least and the most of `ends`."""
        low, high = min(ends), max(ends)
        off = max(1.0, number / high, low / number)
        if off <= 1 + self.tolerance:
            return AS_PUBLISHED
        return UNDECIDED if off <= 1 + 2 * self.tolerance else self.beyond[low > number]


def peaks_gib(row: Row) -> list[float]:
    """Return tensors of the worst rank and all that a device held, or both ends of predicted tensors."""
    columns = ["peak_allocated_bytes", "device_used_bytes"]
    if row["provenance"] == Provenance.PREDICTED:
        columns = ["predicted_peak_allocated_low_bytes", "predicted_peak_allocated_high_bytes"]
    return [size / GIB for size in known_numbers(row, columns)]


def rates(row: Row) -> list[float]:
    """Return tokens/s of the job: one number, or both ends of a replay or a prediction."""
    columns = {
        Provenance.PREDICTED: ["predicted_tokens_per_s_low", "predicted_tokens_per_s_high"],
        Provenance.REPLAYED: ["tokens_per_s_with_link", "tokens_per_s"],
    }.get(row["provenance"], ["tokens_per_s"])
    return known_numbers(row, columns)


def known_numbers(row: Row, columns: Sequence[str]) -> list[float]:
    """Return the row's numbers of these columns that are there."""
    return [*pd.Series([row[column] for column in columns], dtype=float).dropna()]


def _more_s(row: Row, published: float, rate: float) -> float:
    tokens = row["tokens_per_step"]
    return float((tokens / published - tokens / rate) / row["grad_accum"])


def differences(row: Row, published: Published) -> list[str]:
    """Return the settings, as `key=value`, in which a row is not one of the post's runs.

    The device counts as a setting unless the row is predicted.
    """
    expected: dict[str, Any] = {}
    if published.number(row) is not None:
        ranks, strategy = row["cluster.world_size"], row["strategy"]
        methods = SAME_METHOD if ranks > 1 else ("local",)
        expected = {"sp_degree": ranks, "strategy": strategy if strategy in methods else methods[0]}
    usual = {key: value for key, value in USUAL.items() if not pd.isna(row.get(key))}
    expected = {**expected, **SETTINGS, **usual}
    others = {key: row[key] for key, value in expected.items() if row[key] != value}
    found = [f"{key}={str(each).lower() if isinstance(each, bool) else each}" for key, each in others.items()]
    names = device_names().get(row["hardware"], ())
    if not found and row["provenance"] != Provenance.PREDICTED and row["device_name"] not in names:
        return [f"device={row['device_name']}"]
    return found


PEAKS_GB = Published(
    "published, GB",
    {(1, 8): 76.4, (4, 8): 23.4, (4, 32): 35.0, (4, 64): 50.5, (4, 96): 66.0, (4, 128): OUT},
    0.05,
    ("less memory than published", "more memory than published"),
    peaks_gib,
    lambda _, published, peak: published - peak,
    "GiB",
    is_bracket=True,
)


def _revision(name: str, numbers: Mapping[tuple[int, int], float]) -> Published:
    beyond = ("slower than published", "faster than published")
    return Published(name, numbers, 0.10, beyond, rates, _more_s, "s a micro-step", is_bracket=False)


REVISIONS = (
    _revision("A (01d33d5c)", {(1, 8): 2436, (4, 8): 2315, (4, 32): 7872, (4, 64): 13396}),
    _revision("B (5feb9948)", {(1, 8): 3633, (4, 8): 3933, (4, 32): 7733, (4, 64): 13396}),
)
"""Tokens/s of all GPUs in two stored revisions of the post, named by the first digits of their commits."""

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
