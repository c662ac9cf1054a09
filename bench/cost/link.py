"""Time that the messages of one step need on the link, as if no computation hid any of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.cost.band import Band, End
from bench.cost.calibrated_speeds import Speeds, speeds_of
from bench.cost.hardware import Hardware
from bench.cost.traffic import Messages

NUMBER_BYTES = 2
"""Bytes of a number; datasheet rates do not depend on it."""


def link_ms(messages: Sequence[Messages], hardware: Hardware) -> dict[str, Band]:
    """Milliseconds of one step by purpose, at the rates of the hardware's file."""
    by_purpose: dict[str, list[Messages]] = {}
    for each in messages:
        by_purpose.setdefault(each.purpose, []).append(each)
    speeds = {end: speeds_of(hardware, end) for end in End}
    found = {}
    for purpose, its in by_purpose.items():
        times = {end: 1e3 * _one_by_one_s(its, speeds[end]) for end in End}
        found[purpose] = Band.of(times.__getitem__)
    return found


def _one_by_one_s(messages: Sequence[Messages], speeds: Speeds) -> float:
    """Seconds of all messages one after another; a link carries a send and a receive at the same time."""
    taken_s = {"send": 0.0, "recv": 0.0, "collectives": 0.0}
    for each in messages:
        kind = each.exchange.kind
        sent = replace(each.exchange, kind="send") if kind == "recv" else each.exchange
        taken_s[kind if kind in taken_s else "collectives"] += each.count * speeds.exchange_s(
            sent, NUMBER_BYTES
        )
    return taken_s["collectives"] + max(taken_s["send"], taken_s["recv"])
