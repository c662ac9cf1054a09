"""Sentences about replayed cells: the parts that are measured, modelled and not checked."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.answers.verdict import where
from analysis.cells.cells import Cells
from analysis.cells.statuses import NO_SPARE, SPARE_BYTES, shown_statuses
from bench.common.command import sweep_words
from bench.common.labels import size_label
from bench.config import NOT_USED
from bench.record.record import Status

NOTE = (
    "Replayed: one rank of each cell ran. Its kernels, memory and host work are measured. The data that it"
    " received are copies of its own, and communication took no time. The link is modelled: a rate goes from"
    " all of the link's time exposed to none of it."
)
CHOICES = ("model", "layout", "kernel", "dtype", "engine")
"""Settings that the command repeats where all cells have the same."""
NO_RATES = "The rates of the link are not known here, so these rates are upper bounds."


def replay_lines(cells: Cells) -> list[str]:
    """Sentences on what was measured, what is modelled and which real cells vouch for results."""
    ran = cells.are_replayed & cells.frame["status"].ne(Status.UNSUPPORTED)
    return [*_lines(cells)] if ran.any() else []


def _lines(cells: Cells) -> Iterator[str]:
    yield NOTE
    ok = cells.frame[cells.are_replayed & cells.frame["status"].eq("ok")]
    if ok["link_ms"].isna().any():
        yield NO_RATES
    tight = shown_statuses(cells.frame).eq(NO_SPARE)
    if tight.any():
        spare = size_label(SPARE_BYTES)
        yield f"Undecided: {where(cells, tight)} left less than {spare} free, and NCCL may need as much."
    sharing = ok[ok["sp_degree"].gt(1)]
    if len(sharing):
        yield f"Not checked in a replay: losses, gradients, attention's values. To check: {_check(sharing)}"


def _check(sharing: pd.DataFrame) -> str:
    """The command that runs real ranks at a short length, of the smallest group that shares a sequence."""
    ranks = int(sharing["sp_degree"].min())
    cells = sharing[sharing["sp_degree"].eq(ranks)]
    on_gpu = cells["cluster.device"].eq("cuda").all()
    same = [key for key in CHOICES if {*cells[key]} == {cells[key].iloc[0]} - {NOT_USED}]
    words = [
        f"strategy={','.join(sorted({*cells['strategy']}))}",
        f"cluster.world_size={ranks}",
        *([f"cluster.ranks_per_gpu={ranks}"] if on_gpu else []),
        *(f"{key}={cells[key].iloc[0]}" for key in same),
    ]
    return f"{sweep_words()} -m seq_len=1k model.num_layers=1 {' '.join(words)}"
