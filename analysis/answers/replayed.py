"""What replayed cells say and what they cannot, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.answers.verdict import where
from analysis.cells.cells import Cells
from analysis.cells.statuses import NO_SPARE, SPARE_BYTES, shown_statuses
from bench.command import real_ranks_command
from bench.labels import size_label
from bench.record import Provenance

NOTE = (
    "Replayed: one rank of each cell ran. Its kernels, memory and host work are measured. The data that it"
    " received are copies of its own, and communication took no time. The link is modelled: a rate goes from"
    " all of the link's time exposed to none of it."
)
NO_RATES = "The rates of the link are not known here, so these rates are upper bounds."
SAME_CODE = ("strategy", "sp_degree", "layout", "kernel", "dtype", "engine", "workload")
"""Columns in which a measured cell must agree with a replayed one to vouch for its results."""


def replay_lines(cells: Cells) -> list[str]:
    """Sentences on what was measured, what is modelled and which real cells vouch for results."""
    return [*_lines(cells)] if cells.are_replayed.any() else []


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
    if sharing.empty:
        return
    measured = cells.frame["provenance"].eq(Provenance.MEASURED) & cells.frame["status"].eq("ok")
    of_measured = cells.frame.loc[measured, [*SAME_CODE]].apply(tuple, axis=1)
    of_replayed = sharing[[*SAME_CODE]].apply(tuple, axis=1)
    vouching = of_measured.index[of_measured.isin({*of_replayed})]
    if len(vouching):
        rows = cells.frame.index.to_series().isin(vouching)
        yield f"No value of a replay is checked. Real ranks passed their checks: {where(cells, rows)}."
    missing = sharing[~of_replayed.isin({*of_measured})]
    if len(missing):
        first = missing.sort_values("sp_degree").iloc[-1]
        alike = missing[missing["cluster.world_size"].eq(first["cluster.world_size"])]
        command = real_ranks_command(
            sorted(alike["strategy"].unique()),
            int(first["cluster.world_size"]),
            str(first["model"]),
            shares_gpu=first["cluster.device"] == "cuda",
        )
        yield f"No value of a replay is checked; real ranks at a short length are: {command}"
