"""Modes with the time model: `predict`, and `replay`, which uses it only for the time on the link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from bench.config import Cell, ConfigError
from bench.cost.band import Band, BandEnd
from bench.extras.predict.hardware_file import Hardware, hardware_of, has_rates
from bench.extras.predict.predicted_record import complete_predicted
from bench.extras.predict.speeds import Speeds
from bench.record.record import Provenance, Record
from bench.request.modes import MODES, PREDICT, REPLAY, Mode, replay_refusals
from bench.request.packages import package_refusals
from bench.strategies import STRATEGIES
from bench.training.messages import Messages

DIRECTIONS = ("send", "recv")


def register() -> None:
    """Add the modes `replay` and `predict` to the core's table MODES."""
    MODES[REPLAY] = Mode(
        provenance=Provenance.REPLAYED,
        refusals=lambda cell: [*replay_refusals(cell), *package_refusals(cell)],
        complete=add_link_ms,
    )
    MODES[PREDICT] = Mode(
        provenance=Provenance.PREDICTED,
        refusals=prediction_refusals,
        starts_ranks=False,
        complete=complete_predicted,
    )


def add_link_ms(cell: Cell, record: Record) -> Record:
    """Return a copy of the record with `analytic.link_ms`, the replayed step's milliseconds on the link.

    `link_ms` is by purpose. It is None if the step's messages or the rates of the link are unknown.
    """
    return structs.replace(record, analytic=structs.replace(record.analytic, link_ms=_link_ms(cell, record)))


def _link_ms(cell: Cell, record: Record) -> dict[str, Band] | None:
    messages = None if record.engagement is None else record.engagement.messages
    if messages is None or (cell.cluster.world_size > 1 and not has_rates(cell.hardware)):
        return None
    if cell.cluster.world_size == 1:
        return {}
    return link_ms(messages, hardware_of(cell.hardware))


def link_ms(messages: Sequence[Messages], hardware: Hardware) -> dict[str, Band]:
    """Return the milliseconds that one step's messages take on the link, by purpose.

    They are sent one after another, and none is hidden by compute.
    """
    low, expected, high = (_ms_by_purpose(messages, Speeds(hardware, end)) for end in BandEnd)
    return {purpose: Band(low[purpose], ms, high[purpose]) for purpose, ms in expected.items()}


def _ms_by_purpose(messages: Sequence[Messages], speeds: Speeds) -> dict[str, float]:
    """Return the milliseconds on the link by purpose.

    A link carries sends and receives at the same time, so only the longer total of the two counts. A receive
    takes as long as a send of the same payload.
    """
    by_direction = defaultdict[tuple[str, str], float](float)
    for message in messages:
        kind = message.communication.kind
        communication = (
            replace(message.communication, kind="send") if kind == "recv" else message.communication
        )
        ms = 1e3 * message.count * speeds.communication_s(communication)
        by_direction[message.purpose, kind if kind in DIRECTIONS else ""] += ms
    return {
        purpose: by_direction[purpose, ""] + max(by_direction[purpose, kind] for kind in DIRECTIONS)
        for purpose in dict.fromkeys(purpose for purpose, _ in by_direction)
    }


def prediction_refusals(cell: Cell) -> list[str]:
    """Return the reasons why the cell cannot be predicted; it can be without the packages that it needs."""
    if cell.hardware == "cpu":
        way_out = "leave mode=predict out to measure the cell, or name a GPU, such as hardware=h100_80gb"
        return [f"mode=predict is for GPUs: no file has the rates of this CPU; {way_out}"]
    try:
        hardware = hardware_of(cell.hardware)
    except ConfigError as error:
        return [str(error)]
    reasons = []
    if cell.cluster.device == "cpu":
        reasons.append(f"hardware={cell.hardware} is a GPU, but the ranks are on the CPU; take cluster=auto")
    if cell.cluster.ranks_per_gpu > 1:
        reasons.append(
            f"mode=predict has no model of ranks that share a GPU (cluster.ranks_per_gpu="
            f"{cell.cluster.ranks_per_gpu}); take cluster.ranks_per_gpu=1"
        )
    if not cell.workload.trains:
        reasons.append(f"mode=predict cannot predict workload={cell.workload.name}; take workload=train")
    if cell.data.packs:
        reasons.append(
            "mode=predict cannot predict data.packing=documents, because the documents' lengths are unknown;"
            " take data.packing=none"
        )
    if STRATEGIES[cell.strategy].schedule(cell) is None:
        reasons.append(
            f"mode=predict needs a schedule, which strategy={cell.strategy} lacks; define"
            " StrategyFacts.schedule"
        )
    return reasons + _rate_refusals(cell, hardware)


def _rate_refusals(cell: Cell, hardware: Hardware) -> list[str]:
    """Return a refusal if the hardware's file has no rate of the cell's kernel."""
    if Speeds(hardware, BandEnd.EXPECTED).has_rates_of(cell):
        return []
    allowed = STRATEGIES[cell.strategy].kernels
    choices = [kernel for kernel in hardware.attention_forward if allowed is None or kernel in allowed]
    way_out = f"choose kernel={' or '.join(choices)}, or measure the cell" if choices else "measure the cell"
    return [f"mode=predict has no rate of kernel={cell.kernel} on hardware={cell.hardware}; {way_out}"]
