"""A set of fresh processes, in which every implementation takes turns."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cell.launcher import Launcher
from bench.compare_implementations.entrants import Entrant
from bench.compare_implementations.request import REQUEST, Request

if TYPE_CHECKING:
    from bench.node.job import RankJob
    from bench.ranks.log import RankLog


def one_set(
    launcher: Launcher, playing: Sequence[Entrant], budget_s: float, *, is_first: bool
) -> list[dict[str, Any]]:
    """The reports of all ranks; exits with one line where the set failed as a whole."""
    request = Request([entrant.cell.to_json() for entrant in playing], budget_s, is_first)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / REQUEST).write_text(json.dumps(asdict(request)))
        ends = launcher.run(playing[0].cell, Path(folder), entry=take_turns)
    failed = next((end for end in ends if end.report is None), None)
    if failed is not None:
        where = "" if failed.place is None else f" in {failed.place.phase}"
        sys.exit(f"a set of processes failed{where}: {failed.why}")
    return [end.report for end in ends if end.report is not None]


def take_turns(job: RankJob, log: RankLog) -> dict[str, Any]:
    """A rank's whole life, named where no torch is imported."""
    from bench.compare_implementations.turns import in_turns

    return in_turns(job, log, Request.read(job.folder))
