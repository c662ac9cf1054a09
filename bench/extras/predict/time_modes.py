"""The modes whose records rest on a model of time: `predict`, and the link of `replay`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from bench.config import Cell, ConfigError
from bench.cost.band import Band, End
from bench.extras.predict.hardware_file import Hardware, hardware_of, has_rates
from bench.extras.predict.predicted import predicted
from bench.extras.predict.speeds import Speeds
from bench.record.record import Provenance, Record
from bench.request.modes import MODES, PREDICT, REPLAY, Mode, replay_refusals
from bench.request.packages import package_refusals
from bench.strategies import STRATEGIES
from bench.training.messages import Messages

DIRECTIONS = ("send", "recv")


def register() -> None:
    """Add the modes to the table of the core."""
    MODES[REPLAY] = Mode(
        provenance=Provenance.REPLAYED,
        refusals=lambda cell: [*replay_refusals(cell), *package_refusals(cell)],
        complete=with_link,
    )
    MODES[PREDICT] = Mode(
        provenance=Provenance.PREDICTED,
        refusals=prediction_refusals,
        starts_ranks=False,
        complete=predicted,
    )


def with_link(cell: Cell, record: Record) -> Record:
    """Add the milliseconds of one replayed step on the link, by purpose; null where its rates are unknown."""
    return structs.replace(record, analytic=structs.replace(record.analytic, link_ms=_link_ms(cell, record)))


def _link_ms(cell: Cell, record: Record) -> dict[str, Band] | None:
    messages = None if record.engagement is None else record.engagement.messages
    if messages is None or (cell.cluster.world_size > 1 and not has_rates(cell.hardware)):
        return None
    if cell.cluster.world_size == 1:
        return {}
    return link_ms(messages, hardware_of(cell.hardware))


def link_ms(messages: Sequence[Messages], hardware: Hardware) -> dict[str, Band]:
    """Return milliseconds of one step on the link by purpose, as if no computation hid any of it.

    One message comes after another, at the rates of the hardware's file.
    """
    low, expected, high = (_taken_ms(messages, Speeds(hardware, end)) for end in End)
    return {purpose: Band(low[purpose], ms, high[purpose]) for purpose, ms in expected.items()}


def _taken_ms(messages: Sequence[Messages], speeds: Speeds) -> dict[str, float]:
    """By purpose; a link carries a send and a receive at the same time, so the longer of both counts."""
    taken = defaultdict[tuple[str, str], float](float)
    for each in messages:
        kind = each.exchange.kind
        exchange = replace(each.exchange, kind="send") if kind == "recv" else each.exchange
        ms = 1e3 * each.count * speeds.communication_s(exchange)
        taken[each.purpose, kind if kind in DIRECTIONS else ""] += ms
    purposes = dict.fromkeys(purpose for purpose, _ in taken)
    return {each: taken[each, ""] + max(taken[each, kind] for kind in DIRECTIONS) for each in purposes}


def prediction_refusals(cell: Cell) -> list[str]:
    """Why no arithmetic tells what the cell takes. A prediction needs none of the cell's packages."""
    if cell.hardware == "cpu":
        way_out = "leave mode=predict out to measure it, or name a GPU, such as hardware=h100_80gb"
        return [f"mode=predict is for GPUs: no file says how fast this CPU is; {way_out}"]
    try:
        hardware = hardware_of(cell.hardware)
    except ConfigError as error:
        return [str(error)]
    reasons = []
    if cell.cluster.device == "cpu":
        reasons.append(f"hardware={cell.hardware} is a GPU, and the ranks are on the CPU; take cluster=auto")
    if cell.cluster.ranks_per_gpu > 1:
        reasons.append(
            f"mode=predict does not know how ranks share a GPU, as with cluster.ranks_per_gpu="
            f"{cell.cluster.ranks_per_gpu}; take cluster.ranks_per_gpu=1"
        )
    if not cell.workload.trains:
        reasons.append(f"mode=predict is not for workload={cell.workload.name}; take workload=train")
    if cell.data.packs:
        reasons.append(
            "mode=predict is not for data.packing=documents, whose lengths it does not know; take"
            " data.packing=none"
        )
    if STRATEGIES[cell.strategy].schedule(cell) is None:
        reasons.append(
            f"mode=predict knows no schedule of {cell.strategy}; give its facts one: StrategyFacts.schedule"
        )
    return reasons + _rate_refusals(cell, hardware)


def _rate_refusals(cell: Cell, hardware: Hardware) -> list[str]:
    """Which of the cell's operations the hardware's file has no figures of."""
    if Speeds(hardware, End.EXPECTED).knows(cell):
        return []
    bound = STRATEGIES[cell.strategy].kernels
    known = [kernel for kernel in hardware.attention_forward if bound is None or kernel in bound]
    way_out = f"choose kernel={' or '.join(known)}, or measure it" if known else "measure it"
    return [f"mode=predict knows no rate of kernel={cell.kernel} on hardware={cell.hardware}; {way_out}"]
