"""What the post on Ulysses printed beside what was measured or predicted: Markdown in the sweep's folder."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cost.link import rate_with_link
from bench.experiments.markdown import reasons, table, write
from bench.experiments.published import MODEL, OUT_OF_MEMORY, PEAK_GIB, POST, REVISIONS
from bench.labels import GIB, LENGTH_UNITS, length_label, rate_range_label
from bench.record import Provenance
from bench.statistics import slowest_median

Line = Mapping[str, Any]
MEMORY_FILE, THROUGHPUT_FILE = "published_memory.md", "published_throughput.md"
SPAN = 32 * LENGTH_UNITS["k"]
"""Tokens that slopes are told for."""
NAMED = ("length", "ranks", "trainer")
PLACES = {False: "device", True: "host"}


def write_published_memory(records: Sequence[Line], folder: Path) -> None:
    """Write published_memory.md into the folder, and print it; `records` are the lines of the sweep."""
    write(memory_text(records), folder / MEMORY_FILE)


def write_published_throughput(records: Sequence[Line], folder: Path) -> None:
    """Write published_throughput.md into the folder, and print it; `records` are the lines of the sweep."""
    write(throughput_text(records), folder / THROUGHPUT_FILE)


def memory_text(records: Sequence[Line]) -> str:
    """Peaks by length and place of the optimizer, then what the published line says of them."""
    heads = (
        *NAMED, "optimizer on", "provenance", "tensors, GiB", "needed, GiB", "verdict", "published, GiB",
    )  # fmt: skip
    lines = [
        "# Published memory",
        "",
        f"Beside {POST}. One rank's peak.",
        "",
        *table(heads, map(_memory_row, records)),
    ]
    return "\n".join([*lines, "", *_slopes_said(records), *reasons(records)]).rstrip() + "\n"


def _memory_row(record: Line) -> tuple[str, ...]:
    config, gib = record["config"], _measured_gib(record)
    prediction = record["analytic"].get("prediction") or {}
    is_out = config["model"] == MODEL and (config["cluster.world_size"], config["seq_len"]) == OUT_OF_MEMORY
    peak, verdict = "" if gib is None else f"{gib:.4g}", record["status"]
    if record["provenance"] == "predicted":  # what ran is known; what did not, is as the prediction has it
        peak, verdict = _band(prediction.get("peak_allocated_bytes")), prediction.get("fit") or verdict
    return (
        *_named(config),
        PLACES[config["offload.optimizer"]],
        str(record["provenance"]),
        peak,
        _band(prediction.get("needed_bytes")),
        str(verdict),
        "out of memory" if is_out else f"{_published_gib(config) or ''}",
    )


def _named(config: Line) -> tuple[str, str, str]:
    return length_label(config["seq_len"]), str(config["cluster.world_size"]), str(config["trainer"])


def _measured_gib(record: Line) -> float | None:
    memory = record.get("memory")
    return None if memory is None else float(max(memory["peak_allocated_bytes"]) / GIB)


def _published_gib(config: Line) -> float | None:
    is_post = config["model"] == MODEL
    return PEAK_GIB.get((config["cluster.world_size"], config["seq_len"])) if is_post else None


def _band(band: Mapping[str, float] | None) -> str:
    if band is None:
        return ""
    low, expected, high = (band[end] / GIB for end in ("low", "expected", "high"))
    return f"{expected:.1f} ({low:.1f} to {high:.1f})"


def _slopes_said(records: Sequence[Line]) -> Iterator[str]:
    """What each kind of cell that shares sequences takes per SPAN tokens, where there are two lengths."""
    kinds: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for record in records:
        config, needed = record["config"], record["analytic"].get("needed_bytes")
        peak = _published_gib(config) if record["provenance"] == "predicted" else _measured_gib(record)
        if peak is not None and needed is not None and config["cluster.world_size"] > 1:
            kind = (record["provenance"], config["trainer"], config["offload.optimizer"])
            kinds.setdefault(kind, {})[config["seq_len"]] = (peak, needed / GIB)
    for (provenance, trainer, on_cpu), points in kinds.items():
        if len(points) > 1:
            found, formula = (_slope(points, which) for which in (0, 1))
            what = "Published" if provenance == "predicted" else str(provenance).capitalize()
            yield (
                f"- {what} slope, {trainer}, optimizer on the {PLACES[on_cpu]}: {found:.4g} GiB per 32k"
                f" tokens; the formula's {formula:.4g} ({formula / found - 1:+.1%}; nothing fitted)."
            )


def _slope(points: Mapping[int, tuple[float, float]], which: int) -> float:
    """Least squares over lengths, per SPAN tokens."""
    gib = [pair[which] for pair in points.values()]
    return float(statistics.linear_regression([*points], gib).slope * SPAN)


def throughput_text(records: Sequence[Line]) -> str:
    """Tokens per second of the job and of each GPU, beside both revisions of the post."""
    heads = (
        *NAMED, "provenance", "tokens/s", "tokens/s per GPU", "to the base", "published A", "published B",
    )  # fmt: skip
    base = next((_rate(r) for r in records if r["config"]["cluster.world_size"] == 1 and _rate(r)), None)
    commits = ", ".join(f"{name} {each.commit}" for name, each in REVISIONS.items())
    lines = ["# Published throughput", "", f"Beside {POST}, revisions {commits}.", ""]
    lines += [*table(heads, [_throughput_row(record, base) for record in records]), ""]
    return "\n".join([*lines, *reasons(records)]).rstrip() + "\n"


def _rate(record: Line) -> float | None:
    timing = record.get("timing")
    if timing is None or record["status"] != "ok":
        return None
    return float(timing["tokens_per_step"] / slowest_median(timing["step_times_ms"]) * 1e3)


def _throughput_row(record: Line, base: float | None) -> tuple[str, ...]:
    config, rate = record["config"], _rate(record)
    ranks, point = config["cluster.world_size"], (config["cluster.world_size"], config["seq_len"])
    own = [""] * 3 if rate is None else [
        f"{rate:,.0f}", f"{rate / ranks:,.0f}", f"{rate / base:.2f}x" if base else ""
    ]  # fmt: skip
    if rate is not None and record["provenance"] == Provenance.REPLAYED:
        least = rate_with_link(rate, record["timing"]["tokens_per_step"], record["analytic"]["link_ms"])
        own = [*(rate_range_label(least and least / each, rate / each) for each in (1, ranks)), ""]
    said = [each.tokens_per_s.get(point) if config["model"] == MODEL else None for each in REVISIONS.values()]
    published = [f"{number:,}" if number else "" for number in said]
    return (*_named(config), str(record["provenance"]), *own, *published)
