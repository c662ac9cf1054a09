"""Time that the messages of one step need on the link, as if no computation hid any of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.cost.band import Band, End
from bench.cost.traffic import Messages
from bench.extras.predict.hardware import Hardware
from bench.extras.predict.speeds import Speeds

DIRECTIONS = ("send", "recv")


def link_ms(messages: Sequence[Messages], hardware: Hardware) -> dict[str, Band]:
    """Milliseconds of one step by purpose, at the rates of the hardware's file, one message after another."""
    low, expected, high = (_taken_ms(messages, Speeds(hardware, end)) for end in End)
    return {purpose: Band(low[purpose], ms, high[purpose]) for purpose, ms in expected.items()}


def _taken_ms(messages: Sequence[Messages], speeds: Speeds) -> dict[str, float]:
    """By purpose; a link carries a send and a receive at the same time, so the longer of both counts."""
    taken = defaultdict[tuple[str, str], float](float)
    for each in messages:
        kind = each.exchange.kind
        exchange = replace(each.exchange, kind="send") if kind == "recv" else each.exchange
        ms = 1e3 * each.count * speeds.exchange_s(exchange)
        taken[each.purpose, kind if kind in DIRECTIONS else ""] += ms
    purposes = dict.fromkeys(purpose for purpose, _ in taken)
    return {each: taken[each, ""] + max(taken[each, kind] for kind in DIRECTIONS) for each in purposes}
