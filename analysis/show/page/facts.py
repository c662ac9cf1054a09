"""Facts of one cell that the page shows next to its row in the table, and of all records' environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.cells.capacity import capacity_label
from analysis.cells.comparison import BASE
from analysis.cells.parts import has_ideal, step_ms, waterfall_of
from analysis.labels import SHARED_CORES, count_label, number_label
from analysis.read.metrics import text_of
from analysis.show.tables.record import Pairs, as_text, known_facts
from bench.config import UNKNOWN_HARDWARE
from bench.record.record import Provenance

NO_PEAK = "unknown: no file of conf/hardware/ names this device"
CHECKPOINTING: Mapping[tuple[bool, str], str] = {
    (True, "cuda"): "on, as by default on GPUs: layers are computed again in backward, so that more fits",
    (False, "cuda"): "off: all activations are kept for backward; on GPUs the default is on",
    (True, "cpu"): "on: layers are computed again in backward; on a CPU the default is off",
    (False, "cpu"): "off, as by default on a CPU: all activations are kept for backward",
}
"""What a training cell does on a device, and why where it is the default."""
MAX_VALUES = 4
"""More different values than this are counted, not listed."""
ONE_BY_ONE: Mapping[str, str] = {"packages": "package", "inherited_env": "variable"}
"""Mappings of an environment whose entries are shown by themselves, after this word."""
OF_PAIRS = ("gpu_topology", "gpu_p2p")
"""Mappings with a word for each pair of GPUs."""


def cell_facts(cell: Mapping[Any, Any], *, is_ranked: bool = True) -> Pairs:
    """What the table has no column for, without what is not known. No speed-up where nothing is ranked."""
    step = "expected step" if cell["provenance"] == Provenance.PREDICTED else "traced step"
    start = "ideal attention" if has_ideal(cell) else "attention"
    no_peak = cell["hardware"] == UNKNOWN_HARDWARE and pd.notna(cell["step_time_ms"])
    gap = text_of(cell, "straggler_gap_ms")
    return known_facts(
        {
            "tokens/s per rank": text_of(cell, "tokens_per_s_per_rank"),
            "tokens/s over the whole window": text_of(cell, "window_tokens_per_s"),
            "MFU (causal / full)": _both(cell, "mfu_causal", "mfu_full") or (NO_PEAK if no_peak else ""),
            "HFU (causal / full)": _both(cell, "hfu_causal", "hfu_full"),
            "speed-up": _over_base(cell, "speed_up", BASE, "speed_up_base") if is_ranked else "",
            "strong scaling": _scaling(cell),
            "memory one rank may use": capacity_label(cell),
            "checkpointing": _checkpointing(cell),
            "peak reserved": text_of(cell, "peak_reserved_bytes"),
            f"from {start} to the {step}": _waterfall(cell),
            "attention exchange exposed / in flight, worst rank": _both(
                cell, "exposed_attention_exchange_share", "attention_exchange_share"
            ),
            "communication exposed / in flight, worst rank": _both(
                cell, "exposed_communication_share", "communication_share"
            ),
            "communication: range of transfer": _range(cell, "communication_transfer"),
            "communication: range of waiting": _range(cell, "communication_waiting"),
            "straggler gap": f"{gap} ms" if gap else "",
        }
    )


def _checkpointing(cell: Mapping[Any, Any]) -> str:
    """Empty where nothing is trained, or it is not known."""
    if cell["workload"] != "train" or not isinstance(cell["checkpointing"], bool | np.bool_):
        return ""
    return CHECKPOINTING.get((bool(cell["checkpointing"]), str(cell["cluster.device"])), "")


def _waterfall(cell: Mapping[Any, Any]) -> str:
    """`ideal attention 1.20 ms + packing 0.30 ms + ... = 5.60 ms`, without what took no time."""
    if pd.isna(cell["part_attention_ms"]):
        return ""
    parts = " + ".join(f"{part.label} {number_label(ms)} ms" for part, ms in waterfall_of(cell))
    return f"{parts} = {number_label(step_ms(cell))} ms"


def _both(cell: Mapping[Any, Any], *columns: str) -> str:
    """`38.1 % / 61.0 %`, a dash for one that is not known."""
    texts = [text_of(cell, column) for column in columns]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def _range(cell: Mapping[Any, Any], share: str) -> str:
    """`0.1 % to 0.4 %`, of several traced steps."""
    if not cell["traced_steps"] > 1:
        return ""
    return " to ".join(text_of(cell, f"{share}_{end}_share") for end in ("low", "high"))


def _scaling(cell: Mapping[Any, Any]) -> str:
    """The speed-up over the fewest ranks, with what that is of the ideal."""
    text = _over_base(cell, "scaling_speed_up", cell["scaling_base_strategy"], "scaling_base")
    caveat = f"; {SHARED_CORES}" if cell["cluster.device"] == "cpu" else ""
    return f"{text}, efficiency {text_of(cell, 'scaling_efficiency')}{caveat}" if text else ""


def _over_base(cell: Mapping[Any, Any], column: str, strategy: str, base: str) -> str:
    """`1.90 times local on 1 rank (cell 0123456789ab)`."""
    if pd.isna(cell[column]):
        return ""
    ranks = cell[f"{base}_ranks"]
    where = "" if pd.isna(ranks) else f" on {count_label(int(ranks), 'rank')}"
    return f"{text_of(cell, column)} times {strategy}{where} (cell {cell[f'{base}_cell_id']})"


def environment_facts(environments: Iterable[Mapping[str, Any]]) -> Pairs:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in map(_one_by_one, environments):
        for key, value in mapping.items():
            values.setdefault(key, {})[as_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _one_by_one(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment with its packages and variables one by one, and pairs of GPUs that are alike as one."""
    rest = {key: value for key, value in environment.items() if key not in ONE_BY_ONE}
    pairs = {key: _of_pairs(environment[key]) for key in OF_PAIRS if environment.get(key)}
    return {**rest, **pairs} | {
        f"{word} {name}": value
        for key, word in ONE_BY_ONE.items()
        for name, value in (environment.get(key) or {}).items()
    }


def _of_pairs(values: Mapping[str, str]) -> str:
    """`NVLink (all 28 pairs)`, or the pairs of each word: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    alike: dict[str, list[str]] = {}
    for pair, word in values.items():
        alike.setdefault(word, []).append(pair)
    if len(alike) == 1 and len(values) > 1:
        return f"{min(alike)} (all {len(values)} pairs)"
    return ", ".join(f"{word} ({', '.join(pairs)})" for word, pairs in alike.items())
