"""The report's one page: everything the template shows, and the template filled in."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis.figures import FIGURES
from analysis.labels import CPU_BANNER, count_label, is_cpu, number_label, status_label
from analysis.load import Record, device_name
from analysis.memory_facts import largest_blocks, memory_facts
from analysis.style import subtitle
from analysis.tables import HEADINGS, Row, failure_reasons, rows_of
from analysis.verdict import cell_names, verdict

VOLATILE = frozenset({"load_average"})
BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "together")
MAX_VALUES = 4
"""More different values than this are counted, not listed."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure as an address that needs no file beside the page."""

    title: str
    alternative: str
    address: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record behind a cell, in pairs of name and text."""

    title: str
    facts: list[tuple[str, str]]
    blocks: list[tuple[str, ...]]
    log_tail: str | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table with the records behind it; `settings` are those not shared by all cells."""

    anchor: str
    cell_id: str
    name: str
    status: str
    row: Row
    settings: list[tuple[str, str]]
    attempts: list[Attempt]


def render(records: Sequence[Record], summary: pd.DataFrame, svgs: Mapping[str, bytes]) -> str:
    """The whole page as HTML; it loads nothing from anywhere."""
    environment = Environment(
        loader=PackageLoader("analysis", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    configs = [record["config"] for record in records]
    shared = shared_values(configs)
    machines = [_without_volatile(record.get("environment") or {}) for record in records]
    return environment.get_template("report.html.jinja").render(
        subtitle=subtitle(summary),
        banner=CPU_BANNER if is_cpu(summary) else None,
        count=f"{count_label(len(summary), 'cell')}, {count_label(len(records), 'record')}",
        verdict=verdict(summary),
        pictures=[picture(name, svg) for name, svg in svgs.items()],
        headings=HEADINGS,
        block_headings=BLOCK_HEADINGS,
        reasons=failure_reasons(summary),
        cells=cells_of(records, summary, shared),
        shared=[*shared.items()],
        environment=distinct_values(machines),
    )


def picture(name: str, svg: bytes) -> Picture:
    """A figure as a data address, with a sentence for readers who cannot see it."""
    kind = FIGURES[name]
    address = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return Picture(kind.title, f"{kind.title} against sequence length. {kind.reading}.", address)


def cells_of(records: Sequence[Record], summary: pd.DataFrame, shared: Mapping[str, str]) -> list[Cell]:
    """The summary's cells, each with its own settings and its records."""
    behind: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        behind.setdefault(_identity(record["cell_id"], record["provenance"], device_name(record)), []).append(
            record
        )
    columns = (summary[key] for key in ("cell_id", "provenance", "device_name", "status"))
    cells = []
    for number, (cell_id, provenance, device, status, name, row) in enumerate(
        zip(*columns, cell_names(summary), rows_of(summary), strict=True)
    ):
        attempts = behind[_identity(cell_id, provenance, device)]
        cells.append(
            Cell(
                anchor=f"cell-{number}-{cell_id}",
                cell_id=cell_id,
                name=f"{name}, {row.length}",
                status=status,
                row=row,
                settings=_own_settings(attempts[0], shared),
                attempts=[_attempt(record) for record in attempts],
            )
        )
    return cells


def _identity(cell_id: str, provenance: str, device: str | None) -> tuple[str, ...]:
    """What a summary's row is of, with one spelling for an unknown device."""
    return cell_id, provenance, device if isinstance(device, str) else ""


def shared_values(mappings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The entries that all of these have in common, as text; nothing where one alone has no rival."""
    first = mappings[0] if mappings else {}
    return {
        key: _text(value)
        for key, value in first.items()
        if all(key in other and other[key] == value for other in mappings)
    }


def distinct_values(mappings: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            values.setdefault(key, {})[_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _own_settings(record: Record, shared: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(key, _text(value)) for key, value in record["config"].items() if key not in shared]


def _attempt(record: Record) -> Attempt:
    failure = record.get("failure") or {}
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
        "took": None if record.get("wall_s") is None else f"{record['wall_s']:.1f} s",
        "attention modules entered": ", ".join(engagement.get("modules", ())),
        "parity with float64": _parity(record.get("parity")),
        "[tokens, query heads, KV heads] in attention": _text(engagement.get("attention_shapes", "")),
        "bytes sent per step, by purpose and rank": _text(engagement.get("sent_bytes", "")),
        **_traced(record.get("trace") or {}),
        "loss, first to last step": f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else None,
        **memory_facts(record),
    }
    present = [(name, str(text)) for name, text in facts.items() if text]
    title = f"repeat {record['repeat']}"
    return Attempt(title, present, largest_blocks(failure), failure.get("log_tail") or None)


def _traced(trace: Mapping[str, Any]) -> dict[str, str | None]:
    """What a traced step spent on others, in ms by purpose and rank, and how evenly work was spread."""
    return {
        "exposed communication, ms by purpose and rank": _times(trace.get("purpose_exposed_ms")),
        "waiting for other ranks, ms by purpose and rank": _times(trace.get("purpose_waiting_ms")),
        "compute, ms by part and rank": _times(trace.get("compute_ms")),
        "causal (query, key, head) triples by rank": _text(trace.get("causal_area", "")),
        "purposes unknown": "; ".join(filter(None, trace.get("unjoined", ()))),
    }


def _times(times_ms: Mapping[str, Sequence[float]] | None) -> str | None:
    """`attention 1.23, 4.56; gradients 7.89, 0.12`."""
    if not times_ms:
        return None
    return "; ".join(f"{name} {', '.join(map(number_label, ranks))}" for name, ranks in times_ms.items())


def _parity(parity: Mapping[str, Any] | None) -> str | None:
    """Every tensor's error with its limit, relative to its maximum."""
    if not parity:
        return None
    pairs = (
        f"{name} {error:.1e} (limit {parity['limits'][name]:.0e})" for name, error in parity["errors"].items()
    )
    return f"at {parity['tokens']} tokens: {', '.join(pairs)}"


def _without_volatile(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment with its packages one by one, without what changes by the minute."""
    packages = environment.get("packages") or {}
    rest = {key: value for key, value in environment.items() if key not in {*VOLATILE, "packages"}}
    return rest | {f"package {name}": version for name, version in packages.items()}


def _text(value: Any) -> str:
    """A value as a reader would write it: lists and mappings as JSON, nothing as `none`."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
