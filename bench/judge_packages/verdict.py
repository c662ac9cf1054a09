"""What a record says of the package that ran."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.record import Record, Status

WORDS: Mapping[Status, str] = {
    Status.OK: "runs",
    Status.WRONG_RESULT: "wrong",
    Status.UNSUPPORTED: "refuses",
}
"""What other ends are called depends on the error."""
REFUSING = frozenset({"AssertionError", "NotImplementedError", "ValueError"})
"""Errors by which a package says that it cannot."""
FRAME = re.compile(r"site-packages/(\w+)/")
MOST_CHARACTERS = 300


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
    failure, why = record.failure, _short(record.reason or str(record.status))
    if record.status in WORDS:
        return Verdict(WORDS[record.status], "" if record.status is Status.OK else why)
    if failure is None:
        return Verdict("fails", why)
    word = "refuses" if failure.kind in REFUSING else "fails"
    return Verdict(word, _short(f"{_speaker(failure.log_tail)}{failure.kind}: {failure.message}"))


def _speaker(log: str) -> str:
    """The package whose line raised the last error of a log."""
    packages = FRAME.findall(log)
    return f"{packages[-1]}: " if packages else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."
