"""Hugging Face's post on Ulysses next to a sweep's records: a row a record, with a verdict on each number."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import pandas as pd

from analysis.cells.statuses import NO_SPARE, shown_status
from analysis.labels import MISSING, band_label, number_label, status_label
from analysis.read.hardware import device_names
from analysis.show.tables.rows import markdown_table
from bench.common.labels import GIB, LENGTH_UNITS, length_label, rate_range_label
from bench.config import NO_MISTAKE
from bench.record.record import Provenance, Status

Row = Mapping[Any, Any]
"""A record's row of the frame."""
POST = "huggingface/blog, `ulysses-sp.md`"
OUT = inf
"""Stands for a published run that ended out of memory."""
STACK = ("trl", "flash_attn_2")
"""Trainer and kernel of the post."""
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
trainer, the kernel and the place of the optimizer may differ: a row names them."""
USUAL: Mapping[str, str | int] = {
    "mistake": NO_MISTAKE,
    "cluster.ranks_per_gpu": 1,
    "cluster.memory_limit_gib": 0,
    "engine.leaf": "none",
}
"""Settings with which a record says something of its hardware."""
SAME_METHOD = ("deepspeed_ulysses", "ulysses")
SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are given for."""


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

    def number(self, row: Row) -> float | None:
        """Return the published number of the row's cell; None where nothing is published."""
        return self.numbers.get((row["cluster.world_size"], row["seq_len"] / LENGTH_UNITS["k"]))

    def verdict(self, published: float, ours: Sequence[float]) -> str:
        """Return the verdict on a result between the least and the most of `ours`."""
        low, high = min(ours), max(ours)
        off = max(1.0, published / high, low / published)
        if off <= 1 + self.tolerance:
            return AS_PUBLISHED
        return UNDECIDED if off <= 1 + 2 * self.tolerance else self.beyond[low > published]


AS_PUBLISHED, UNDECIDED, NOT_COMPARABLE = "as published", "undecided", "not comparable"
RATE_VERDICTS = ("slower than published", "faster than published")
PEAKS_GB = Published(
    "published, GB",
    {(1, 8): 76.4, (4, 8): 23.4, (4, 32): 35.0, (4, 64): 50.5, (4, 96): 66.0, (4, 128): OUT},
    0.05,
    ("less memory than published", "more memory than published"),
)
REVISIONS = (
    Published(
        "A (01d33d5c)",
        {(1, 8): 2436, (4, 8): 2315, (4, 32): 7872, (4, 64): 13396},
        0.10,
        RATE_VERDICTS,
    ),
    Published(
        "B (5feb9948)",
        {(1, 8): 3633, (4, 8): 3933, (4, 32): 7733, (4, 64): 13396},
        0.10,
        RATE_VERDICTS,
    ),
)
"""Tokens/s of all GPUs in two stored revisions of the post, named by the first digits of their commits."""
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


def _reading(published: Published, beyond: str) -> str:
    near = round(100 * published.tolerance)
    return READING.format(near=near, far=2 * near, beyond=beyond)


def memory_text(rows: Sequence[Row]) -> str:
    """Return the peaks by length and place of the optimizer, then the slopes of the formula and the post."""
    heads = (*NAMED, "status", "tensors, GiB", "device, GiB", PEAKS_GB.name)
    head = MEMORY.format(post=POST, revisions=" and ".join(each.name for each in REVISIONS))
    head += _reading(PEAKS_GB, "more or less memory")
    return "\n".join([head, markdown_table(heads, [*map(_memory_row, rows)]), *_slopes(rows)])


def _memory_row(row: Row) -> tuple[str, ...]:
    peaks = _peaks_gib(row)
    return (
        *_names(row),
        status_label(shown_status(row)),
        _size(row, "peak_allocated", "peak_allocated_bytes"),
        _size(row, "needed", "device_used_bytes"),
        _comparison(row, PEAKS_GB, peaks, lambda published, peak: published - peak, "GiB"),
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


def _slopes(rows: Sequence[Row]) -> list[str]:
    """Return the slope of each kind of cells that share sequences, where two lengths or more are known."""
    kinds: dict[tuple[str, ...], dict[int, tuple[float, float]]] = {}
    for row in rows:
        *_, trainer, kernel, place, provenance = _names(row)
        peaks, what = _peaks_gib(row), provenance.capitalize()
        if provenance == Provenance.PREDICTED:
            published, what = PEAKS_GB.number(row), "Published"
            is_known = published is not None and not isinf(published) and not _differences(row, PEAKS_GB)
            peaks = [published] if published is not None and is_known else []
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
    heads = (*NAMED, "tokens/s", "per GPU", "to the base", *(each.name for each in REVISIONS))
    head = THROUGHPUT.format(post=POST) + _reading(REVISIONS[0], "faster or slower")
    bases = {_kind(row): _rates(row) for row in rows if row["cluster.world_size"] == 1}
    table = markdown_table(heads, [_throughput_row(row, bases.get(_kind(row), [])) for row in rows])
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


def _throughput_row(row: Row, base: Sequence[float]) -> tuple[str, ...]:
    rates, tokens = _rates(row), row["tokens_per_step"]

    def more_s(published: float, rate: float) -> float:
        return float((tokens / published - tokens / rate) / row["grad_accum"])

    return (
        *_names(row),
        *(_rate_label(row, rates, ranks) for ranks in (1, row["cluster.world_size"])),
        f"{rates[0] / base[0]:.2f}x" if len(base) == len(rates) == 1 else MISSING,
        *(_comparison(row, revision, rates, more_s, "s a micro-step") for revision in REVISIONS),
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
    published: Published,
    ours: Sequence[float],
    more: Callable[[float, float], float],
    unit: str,
) -> str:
    """Return the published number of the row's cell, the verdict on it and its distance from ours."""
    number, others = published.number(row), _differences(row, published)
    if others:
        return f"{NOT_COMPARABLE}: {', '.join(others)}"
    if number is None:
        return "nothing published"
    text = f"{'OOM' if isinf(number) else number_label(number)}: {_verdict(row, published, number, ours)}"
    if isinf(number) or not ours:
        return text
    low, high = sorted(more(number, each) for each in (ours[0], ours[-1]))
    if low < 0 < high:
        return f"{text}; {number_label(-low)} {unit} less to {number_label(high)} more than ours"
    ends = " to ".join(dict.fromkeys(map(number_label, sorted((abs(low), abs(high))))))
    return f"{text}; {ends} {unit} {'less' if low < 0 else 'more'} than ours"


def _verdict(row: Row, published: Published, number: float, ours: Sequence[float]) -> str:
    status = shown_status(row)
    if row["provenance"] == Provenance.PREDICTED:
        return "predicted"
    if isinf(number) and status in (NO_SPARE, Status.OK):
        return UNDECIDED if status == NO_SPARE else "ran where the source ran out of memory"
    if status == Status.OUT_OF_MEMORY:
        return "out of memory as published" if isinf(number) else "out of memory where the source ran"
    if isinf(number) or not ours:
        return status_label(status)
    if row["provenance"] == Provenance.MEASURED or published is PEAKS_GB:
        return published.verdict(number, ours)
    ends = {published.verdict(number, [each]) for each in ours}
    return ends.pop() if len(ends) == 1 else UNDECIDED


def _differences(row: Row, published: Published) -> list[str]:
    """Return the settings, as `key=value`, in which a row is not one of the post's runs.

    The device counts as a setting unless the row is predicted.
    """
    expected = _expected(row, published)
    found = [f"{key}={_shown(row[key])}" for key, value in expected.items() if row[key] != value]
    names = device_names().get(row["hardware"], ())
    if not found and row["provenance"] != Provenance.PREDICTED and row["device_name"] not in names:
        return [f"device={row['device_name']}"]
    return found


def _expected(row: Row, published: Published) -> dict[str, Any]:
    """Return the settings of the post's run at the row's length and number of GPUs."""
    point: dict[str, Any] = {}
    if published.number(row) is not None:
        ranks, strategy = row["cluster.world_size"], row["strategy"]
        methods = SAME_METHOD if ranks > 1 else ("local",)
        point = {"sp_degree": ranks, "strategy": strategy if strategy in methods else methods[0]}
    usual = {key: value for key, value in USUAL.items() if not pd.isna(row.get(key))}
    return {**point, **SETTINGS, **usual}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TEXTS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "published_memory": memory_text,
    "published_throughput": throughput_text,
}
