"""What a record says of the package that ran."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.record import Record, Status

REFUSING = frozenset({"AssertionError", "NotImplementedError", "ValueError"})
"""Errors by which a package says that it cannot."""
FRAME = re.compile(r"site-packages/(\w+)/")
MOST_WORDS = 160


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer."""

    word: str
    """runs, wrong (a gate found it), refuses (the package says so), fails, or absent (not installed)."""
    why: str = ""
    """The gate's words or the package's, empty where it runs."""

    @property
    def runs(self) -> bool:
        return self.word == "runs"


def verdict_of(record: Record) -> Verdict:
    """What became of a cell that nobody refused beforehand."""
    if record.status is Status.OK:
        return Verdict("runs")
    if record.failure is None or record.status in (Status.WRONG_RESULT, Status.UNSUPPORTED):
        word = "wrong" if record.status is Status.WRONG_RESULT else "refuses"
        return Verdict(word, _short(record.reason or str(record.status)))
    failure = record.failure
    word = "refuses" if failure.kind in REFUSING else "fails"
    return Verdict(word, _short(f"{_speaker(failure.log_tail)}{failure.kind}: {failure.message}"))


def _speaker(log: str) -> str:
    """The package whose line raised the last error of a log."""
    packages = FRAME.findall(log)
    return f"{packages[-1]}: " if packages else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS]}..."
