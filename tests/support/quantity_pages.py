"""Read the pages of docs/quantities, and make a record in which all numbers differ."""

import re
import tempfile
from pathlib import Path

from msgspec import to_builtins

from analysis.cells.cells import Cells
from bench.cost.memory import memory_need
from bench.extras.predict.predicted_record import prediction_of
from bench.run.cell.outcome import analytic
from tests.support.cells import FOUR_H100, make_cell
from tests.support.records import frame_of_records, make_record, make_timing, make_trace, with_attention_calls

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "quantities"
PEAK_FLOPS_PER_S = 1e15
MEMORY = {
    "peak_allocated_bytes": [20, 40, 30],
    "whole_life_allocated_bytes": [50, 70, 60],
    "forward_peak_bytes": [14, 16, 13],
    "backward_peak_bytes": [15, 18, 17],
    "peak_reserved_bytes": [80, 81, 79],
    "device_used_bytes": [100, 103, 102],
    "peak_resident_bytes": [500, 650, 600],
    "base_resident_bytes": [300, 510, 410],
    "outside_allocator_bytes": [21, 23, 22],
    "offloaded_activation_bytes": [7, 9, 8],
    "offloaded_optimizer_bytes": [11, 12, 14],
}
LINK_MS = {
    "attention": {"low": 1.0, "expected": 2.0, "high": 4.0},
    "gradients": {"low": 0.5, "expected": 0.7, "high": 1.1},
}
LOOKED_UP = ("seq_len=512", "sp_degree=4", "cluster.world_size=4")


def text_of(page):
    """Return the section of `family#section`, with its heading."""
    family, _, section = page.partition("#")
    parts = re.split(r"^(?=## )", (FOLDER / f"{family}.md").read_text(), flags=re.MULTILINE)
    (text,) = (part for part in parts if anchor_of(part.partition("\n")[0]) == section)
    return text


def anchor_of(heading):
    """Return the anchor that GitHub gives a heading such as `## Step time`."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def named_in(text):
    """Return everything in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def formula_of(page):
    """Return the Python of a section; empty if its formula is text."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE))


def distinct_record():
    """Return a record in which every rank, step and part has its own number."""
    steps_ms = [[100.0 + step * (rank + 1) for step in range(9)] for rank in range(3)]
    cell = make_cell(*LOOKED_UP, machine=FOUR_H100)
    record = make_record(
        config={"cluster.world_size": 3, "sp_degree": 3},
        timing=make_timing(steps_ms),
        trace=distinct_trace(),
        memory=MEMORY,
        analytic=to_builtins(analytic(cell, need=memory_need(cell)))
        | {"link_ms": LINK_MS, "prediction": to_builtins(prediction_of(cell).as_record())},
        losses={"loss": [5.5, 5.0, 4.5]},
        telemetry={"power_w": [[400.0, 600.0] * 3, [410.0, 430.0] * 3, [300.0] * 7]},
    )
    return with_attention_calls(record, forward_ms=[[1.0, 2.0, 1.0], [2.5, 1.0, 1.5], [1.0, 1.0, 3.5]],
                        backward_ms=[[3.0, 3.5, 3.0], [4.0, 2.0, 4.0], [1.0, 1.0, 1.0]])  # fmt: skip


def distinct_trace():
    """Return six traced steps, the second of which is the median."""
    trace = make_trace(
        3,
        step_ms=[110.0, 112.0, 115.0],
        total_ms=[22.0, 30.0, 25.0],
        exposed_ms=[19.0, 11.0, 12.0],
        purpose_total_ms={"attention": [14.0, 15.0, 13.0], "parameters": [8.0, 9.0, 7.0]},
        purpose_exposed_ms={
            "attention": [7.0, 6.0, 9.0],
            "parameters": [2.0, 2.5, 2.2],
            "gradients": [1.0, 1.5, 1.2],
            "data_and_loss": [0.3, 0.5, 0.4],
            "other": [0.1, 0.2, 0.6],
        },
        purpose_exposed_waiting_ms={"attention": [3.0, 2.0, 1.0]},
        compute_ms={
            "attention": [60.0, 66.0, 63.0],
            "packing": [4.0, 5.0, 3.0],
            "optimizer": [10.0, 10.5, 9.0],
            "other": [19.0, 18.0, 17.0],
        },
        copies_ms={"packing": [0.7, 0.8, 0.9], "optimizer": [1.1, 1.2, 1.3], "other": [1.4, 1.7, 1.5]},
        idle_ms=[6.0, 7.0, 5.0],
        median_step=1,
    )
    trace["steps"] = [
        traced_step([100.0, 104.0, 101.0], attention=([9.0, 8.0, 7.5], [4.0, 1.0, 2.0])),
        trace.copy(),
        traced_step([118.0, 117.0, 116.0], attention=([8.0, 6.0, 9.0], [1.0, 2.5, 5.0])),
        traced_step([119.0, 118.0, 117.0], attention=([8.5, 7.0, 9.0], [1.5, 2.0, 3.0])),
        traced_step([150.0, 140.0, 130.0], attention=([70.0, 60.0, 50.0], [2.0, 2.0, 2.0])),
        traced_step([60.0, 61.0, 62.0], attention=([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])),
    ]
    return trace


def traced_step(step_ms, attention):
    """Return a step in which rank 0 alone exposes parameters, and waits for half of that time."""
    exposed, waiting = attention
    return {
        "step_ms": step_ms,
        "purpose_exposed_ms": {"attention": exposed, "parameters": [2.0, 0.0, 0.0]},
        "purpose_exposed_waiting_ms": {"attention": waiting, "parameters": [1.0, 0.0, 0.0]},
    }


def summary_of_one():
    """Return the summary of this record."""
    with tempfile.TemporaryDirectory() as folder:
        frame = frame_of_records(Path(folder), [distinct_record()], {"h100_80gb": PEAK_FLOPS_PER_S})
    return Cells.of_records(frame).frame
