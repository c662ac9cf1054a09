"""The memory that cells need as tables: Markdown for people, and every term as CSV for programs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path

from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.cost.memory import MemoryNeed
from bench.experiments.memory_fit import Room, room_of
from bench.labels import GIB, length_label

COMMAND = "python run_sweep.py experiment=memory_fit sweep_dir=docs"
PREAMBLE = f"""\
What one rank is estimated to need, in GiB, of the cells that the README's sweep plans on 1, 4 and 8 GPUs,
with the model that it picks there. **Bold** is more than the device has even if all that is not known turns
out well; a question mark means that it may be: the plan says so before the first cell, and the cell is tried
all the same. `local` takes one of the GPUs. Where there is only one, no ranks can share a sequence: `local`
is compared alone, with checkpointing on and off.

The estimate is the sum of the terms in `bench/cost/memory.py`; the command below also writes them one by
one, with both ends of their sum, to memory_fit.csv. Of tensors it is within 1 % of nine measured peaks of CPU
ranks. What is not known is in `bench/cost/memory_band.py`: what the allocator cannot use, what ZeRO-3 keeps
gathered, and all that CUDA and NCCL take: near the limit only a run decides. No cell of this page has been
run on a GPU by us.

    {COMMAND}
"""
NEEDED = ("needed_bytes", "needed_low_bytes", "needed_high_bytes", "usable_bytes", "fit")
MARKS = {Fit.FITS: "{}", Fit.UNDECIDED: "{}?", Fit.OUT_OF_MEMORY: "**{}**"}
HEADS = ("ranks", "model", "strategy", "checkpointing")
DECIDES = (
    "hardware",
    "world_size",
    "model",
    "strategy",
    "checkpointing",
    "seq_len",
    "engine",
    "dtype",
    "loss",
    "tiled_mlp",
    "offload.activations",
    "offload.optimizer",
)


def write_memory_fit(cells: Sequence[RunConfig], folder: Path) -> None:
    """Write memory_fit.csv and memory_fit.md into the folder, and print the latter."""
    fits = [room_of(cell) for cell in cells]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory_fit.csv").write_text(csv_text(fits), encoding="utf-8")
    (folder / "memory_fit.md").write_text(markdown_text(fits), encoding="utf-8")
    print(markdown_text(fits))
    print(f"table: {folder / 'memory_fit.md'}, {folder / 'memory_fit.csv'}")


def csv_text(fits: Sequence[Room]) -> str:
    """One line a cell: what decides it, each term, their sum and what a rank may use, in bytes."""
    terms = [field.name for field in fields(MemoryNeed)]
    columns = [*DECIDES, *(f"{term}_bytes" for term in terms), *NEEDED]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for fit in fits:
        sizes = asdict(fit.need)
        decides = [_decides(fit.cell)[key] for key in DECIDES]
        needed = [fit.need.total, round(fit.needed.low), round(fit.needed.high), fit.usable, fit.fit.value]
        writer.writerow([*decides, *(sizes[term] for term in terms), *needed])
    return text.getvalue()


def _decides(cell: RunConfig) -> dict[str, object]:
    named = {"model": cell.model.name, "world_size": cell.cluster.world_size}
    return asdict(cell) | named | _switches(cell)


def markdown_text(fits: Sequence[Room]) -> str:
    """A section for each amount of usable memory: a row a strategy, a column a length."""
    lines = ["# What fits", "", PREAMBLE]
    for (usable, devices), rows in _sections(fits).items():
        lengths = sorted({fit.cell.seq_len for row in rows.values() for fit in row})
        heads = [*HEADS, *map(length_label, lengths)]
        lines += [f"## {usable / GIB:.1f} GiB usable: {', '.join(devices)}", ""]
        lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads))]
        for named, row in rows.items():
            sizes = {fit.cell.seq_len: _size(fit) for fit in row}
            lines.append(f"| {' | '.join([*named, *(sizes.get(length, '') for length in lengths)])} |")
        lines.append("")
    return "\n".join(lines)


def _size(fit: Room) -> str:
    text = f"{fit.need.total / GIB:.1f}"
    return MARKS[fit.fit].format(text)


Row = tuple[str, ...]


def _sections(fits: Sequence[Room]) -> dict[tuple[int, tuple[str, ...]], dict[Row, list[Room]]]:
    """The rows of each amount of memory, with the devices that have it: those of one of them are all's."""
    devices: dict[int, list[str]] = {}
    for fit in fits:
        names = devices.setdefault(fit.usable, [])
        if fit.cell.hardware not in names:
            names.append(fit.cell.hardware)
    sections: dict[tuple[int, tuple[str, ...]], dict[Row, list[Room]]] = {}
    for fit in sorted(fits, key=lambda fit: fit.usable):
        names = devices[fit.usable]
        if fit.cell.hardware == names[0]:
            rows = sections.setdefault((fit.usable, tuple(names)), {})
            rows.setdefault(_row(fit.cell), []).append(fit)
    return sections


def _row(cell: RunConfig) -> Row:
    words = [
        "on" if cell.checkpointing else "off",
        *(name for name, is_on in _switches(cell).items() if is_on),
    ]
    return str(cell.cluster.world_size), cell.model.name, cell.strategy, ", ".join(words)


def _switches(cell: RunConfig) -> dict[str, bool]:
    """What beside checkpointing takes off memory, by its key."""
    offload = cell.offload
    return {
        "tiled_mlp": cell.tiled_mlp,
        "offload.activations": offload.activations,
        "offload.optimizer": offload.optimizer,
    }
