"""What a record says of the package that ran."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.config import RunConfig
from bench.passes import first_failure
from bench.passes.engagement.section import EngagementFacts, wrong_exchange
from bench.record import Record, Status

WORDS: Mapping[Status, str] = {
    Status.OK: "runs",
    Status.WRONG_RESULT: "wrong",
    Status.UNSUPPORTED: "refuses",
}
"""What other ends are called depends on the error."""
REFUSING = frozenset({"AssertionError", "NotImplementedError", "ValueError"})
"""Errors by which a package says that it cannot; so does any that a line of its own raises."""
FRAME = re.compile(r"site-packages/(\w+)/[^\n]*(?:\n *(raise)\b)?")
MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer."""

    word: str
    """One of those that the page explains."""
    why: str = ""
    """The gate's words, the package's or ours; empty where it runs."""

    @property
    def runs(self) -> bool:
        return self.word == "runs"


def verdict_of(record: Record, cell: RunConfig) -> Verdict:
    """What became of a cell that nobody refused beforehand."""
    failure, why = record.failure, _short(record.reason or str(record.status))
    if record.status is Status.WRONG_RESULT and _only_bytes_differ(record, cell):
        return Verdict("unexplained", why)
    if record.status in WORDS:
        return Verdict(WORDS[record.status], "" if record.status is Status.OK else why)
    if failure is None:
        return Verdict("fails", why)
    speaker, raises = _last_frame(failure.log_tail)
    word = "refuses" if failure.kind in REFUSING or raises else "fails"
    return Verdict(word, _short(f"{speaker}{failure.kind}: {failure.message}"))


def _only_bytes_differ(record: Record, cell: RunConfig) -> bool:
    """Whether attention's bytes are not those of our formula, and no gate found a wrong number."""
    engagement = record.sections.get(EngagementFacts.name)
    if engagement is None or record.reason != wrong_exchange(cell, engagement):
        return False
    return first_failure(cell, {**record.sections, EngagementFacts.name: None}) is None


def _last_frame(log: str) -> tuple[str, bool]:
    """The package whose line raised the last error of a log, and whether that line says `raise`."""
    frames: list[tuple[str, str]] = FRAME.findall(log)
    return (f"{frames[-1][0]}: ", bool(frames[-1][1])) if frames else ("", False)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
