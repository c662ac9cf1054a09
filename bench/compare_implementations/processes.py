"""Sets of fresh processes, in each of which every implementation takes turns."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cell.launcher import Launcher
from bench.compare_implementations.entrants import Entrant, Refused
from bench.compare_implementations.request import LOOK_AT, REQUEST, Request

if TYPE_CHECKING:
    from bench.node.end import RankEnd
    from bench.node.job import RankJob
    from bench.ranks.log import RankLog

Reports = Sequence[dict[str, Any]]
"""Of all ranks of one set."""


@dataclass(frozen=True, slots=True)
class Played:
    """What became of those who play in one setting."""

    playing: Sequence[Entrant]
    sets: Sequence[Reports]
    refused: Sequence[Refused]
    """Who ended a set of processes, and how."""


class SetError(Exception):
    """A set of processes that ended as a whole."""

    def __init__(self, end: RankEnd) -> None:
        self.phase = "" if end.place is None else end.place.phase
        super().__init__(f"a set of processes ended: {end.why}")

    @property
    def number(self) -> int | None:
        """Of the implementation that was looked at; None where none was."""
        number = self.phase.removeprefix(LOOK_AT)
        return None if number == self.phase else int(number)


def played(launcher: Launcher, playing: Sequence[Entrant], budget_s: float, processes: int) -> Played:
    """All sets; who ends one while it is looked at is left out, and the others begin anew.

    Exits with one line where nobody is to blame, or none is left.
    """
    refused: list[Refused] = []
    while True:
        try:
            sets = [
                _one_set(launcher, playing, budget_s, is_first=number == 0) for number in range(processes)
            ]
            return Played(playing, sets, refused)
        except SetError as error:
            if error.number is None or len(playing) == 1:
                sys.exit(str(error))
            refused.append(Refused(playing[error.number].label, str(error)))
            playing = [*playing[: error.number], *playing[error.number + 1 :]]


def _one_set(launcher: Launcher, playing: Sequence[Entrant], budget_s: float, *, is_first: bool) -> Reports:
    """The reports of all ranks; raises SetError where one has none."""
    with tempfile.TemporaryDirectory() as folder:
        request = Request([each.cell.to_json() for each in playing], budget_s, is_first)
        (Path(folder) / REQUEST).write_text(json.dumps(asdict(request)))
        ends = launcher.run(playing[0].cell, Path(folder), entry=take_turns)
    failed = [end for end in ends if end.report is None]
    if failed:  # by a rank that had not to be stopped, where there is one
        raise SetError(min(failed, key=lambda end: end.exit_code is None))
    return [end.report for end in ends if end.report is not None]


def take_turns(job: RankJob, log: RankLog) -> dict[str, Any]:
    """A rank's whole life, named where no torch is imported."""
    from bench.compare_implementations.turns import in_turns

    return in_turns(job, log, Request.read(job.folder))
