"""Records of observed loops with their checks, and messages why a loop is wrong or not judged. No torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.common.environment import REPOSITORY, git_output
from bench.config import Cell, ConfigError
from bench.cost.memory import MemoryNeed, memory_need
from bench.extras.observe.objective import (
    RankObjective,
    has_known_scale,
    objective_mistake,
    reason_not_compared,
)
from bench.extras.observe.places import find_places
from bench.extras.observe.tokens import LoopReport, ShardTokens, restarts, sharding_mistake
from bench.measure import Sections, checks, first_failure, merge_reports
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN
from bench.plan.planned import PlannedCell
from bench.record.record import Record, Role
from bench.record.store import Store, read_records
from bench.run.cell.ends import classify
from bench.run.cell.outcome import completed_record, failure_record, first_rank_flaw, unsupported_record
from bench.run.node.ranks import RankEnd
from bench.run.node.stacks import PACKAGES_PATH, Frame
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS


def observed_record(
    cell: Cell,
    reports: Sequence[LoopReport],
    groups: Sequence[Sequence[ShardTokens]],
    repeat: int,
    wall_s: float,
    started_at: datetime,
) -> Record:
    """Return the record of a loop that ran all steps of its observation.

    `reports` are those of all ranks, in rank order. `groups` has the tokens of the ranks of every sequence
    group. `repeat` is the number of earlier records of this cell.
    """
    planned = PlannedCell(cell, repeat, repeat, Role.OBSERVED, need=loop_need(cell))
    wrong_inputs = next(filter(None, map(sharding_mistake, groups)), None)
    refusal = _size_refusal(reports) or (None if wrong_inputs else _layer_refusal(reports))
    if refusal is not None:
        return unsupported_record(planned, refusal, wall_s, started_at)
    ranks = [report.rank_report for report in reports]
    sections = merge_reports(ranks, cell)
    objectives = [report.objective for report in reports]
    not_finite = [report.stated_not_finite for report in reports if report.stated_not_finite is not None]
    wrong = (
        group_mistake(cell, sections)
        or wrong_inputs
        or (min(not_finite)[1] if not_finite else None)
        or _cell_mistake(cell, sections, groups)
        or first_rank_flaw(ranks, range(len(ranks)))
        or objective_mistake(objectives, [[*group[0].group] for group in groups], cell.dtype)
    )
    made = loop_checks(cell, sections, groups, objectives)
    return completed_record(planned, ranks, sections, made, wrong, wall_s, started_at)


def loop_need(cell: Cell) -> MemoryNeed | None:
    """Return the bytes that a rank needs; None if the loop's strategy or engine has no formula."""
    has_formula = cell.strategy in STRATEGIES and cell.engine.name in ENGINE_FACTS
    return memory_need(cell) if has_formula else None


def failed_record(cell: Cell, end: RankEnd, wall_s: float, started_at: datetime) -> Record:
    """Return the record of a loop that an error has ended; `end` belongs to the rank that raised it."""
    status, failure = classify([end])
    assert failure is not None
    return failure_record(PlannedCell(cell, 0, 0, Role.OBSERVED), status, failure, wall_s, started_at)


def user_frame(error: BaseException) -> str:
    """Return the innermost frame of the user's code in a traceback, such as `step (loop.py:7)`."""
    frames = traceback.extract_tb(error.__traceback__)
    other_code = PACKAGES_PATH, f"{REPOSITORY}/bench/"
    of_user = [frame for frame in frames if not any(path in frame.filename for path in other_code)]
    frame = (of_user or frames)[-1]
    return Frame(frame.filename, frame.lineno or 0, frame.name).label


def store_once(record: Record, store: Store) -> Record:
    """Store the record, with the facts about the user's script, and return it.

    A failure is not stored if the same run has another one: several ranks may raise the same error.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    facts = script_facts(Path(file) if file else None, sys.argv)
    record = replace(record, environment=replace(record.environment, **facts))
    key = (record.cell_id, record.started_at)
    failures = (stored for stored in store.read() if stored.failure is not None)
    if record.failure is None or all((stored.cell_id, stored.started_at) != key for stored in failures):
        store.append(record)
    return record


def script_facts(script: Path | None, argv: Sequence[str]) -> dict[str, Any]:
    """Return the entries `script_commit`, `script_dirty` and `argv` of a record's `environment`.

    The first two are None if the script is not in a git repository. Absolute paths in `argv` are reduced to
    their last part, because they may contain a user's name.
    """
    folder = None if script is None else script.resolve().parent
    commit = None if folder is None else git_output(folder, "rev-parse", "HEAD")
    changes = None if folder is None or commit is None else git_output(folder, "status", "--porcelain")
    return {
        "script_commit": commit,
        "script_dirty": None if changes is None else bool(changes),
        "argv": [re.sub(r"^([^=/]*=)?/.*/", r"\1.../", word) for word in argv],
    }


def sequence_groups(reports: Sequence[LoopReport]) -> list[list[ShardTokens]]:
    """Return the tokens of all ranks, grouped by the sequence that the ranks share."""
    shards = [report.tokens for report in reports]
    groups = dict.fromkeys(tuple(shard.group) for shard in shards)
    return [[shards[rank] for rank in group] for group in groups]


def _size_refusal(reports: Sequence[LoopReport]) -> str | None:
    """Return a message if ranks or steps had batches of different sizes; None if all had one size."""
    sizes = sorted({size for report in reports for size in report.step_sizes})
    if len(sizes) == 1:
        return None
    return (
        f"ranks or steps had batches of different sizes ({', '.join(sizes[:3])}), so step times"
        " cannot be compared; pad all batches to one size"
    )


def _layer_refusal(reports: Sequence[LoopReport]) -> str | None:
    """Return a message if ranks share a sequence and not all layers are plain causal attention; else None."""
    layers = dict.fromkeys(layer for report in reports for layer in report.unplain_layers)
    if not layers or len(reports[0].tokens.group) == 1:
        return None
    return (
        "ranks share a sequence, and bench.observe does not check that these layers see the other ranks'"
        f" tokens: {', '.join(layers)}; compare the loss of each position with one device, or train without"
        " sequence parallelism"
    )


def check_folder(folder: Path) -> None:
    """Create the folder and test that records can be added, so that errors are raised before the training.

    Raises:
        ConfigError: The folder cannot be written to.
        StoreError: Its records cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"bench.observe: folder={folder}: cannot be written to ({error.strerror or error}); pass another"
            " folder="
        ) from None
    if (folder / "records.jsonl").exists():
        read_records(folder / "records.jsonl")


def write_report(folder: Path) -> None:
    """Write tables, figures and the page in another process, so that the training imports none of it."""
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [sys.executable, "-m", "analysis.report", str(folder.absolute())], cwd=REPOSITORY, check=False
    )


NEVER_CHECKED: Mapping[str, str] = {
    "losses and gradient norms": "bench.observe does not keep the losses of a loop",
    "training signal": "there is no other computation of this loop to compare with",
    "every gradient at full length": "there is no other computation of this loop to compare with",
    "loss by position": "there is no other computation of this loop to compare with",
}
"""Reasons why a check is never made in observed loops, by the check's name."""
CELL_CHECKS = frozenset({
    "every gradient on the cell's engine", "every shard of the parameters",
})  # fmt: skip
"""Checks on built-in data or a built-in optimizer. Loops have the check `objective` instead."""
NEXT_TOKENS = "the mean loss of next tokens"


def loop_checks(
    cell: Cell,
    sections: Sections,
    groups: Sequence[Sequence[ShardTokens]],
    objectives: Sequence[RankObjective],
) -> list[Check]:
    """Return the checks of all passes, with reasons that apply to observed loops.

    `sections` are merged over all ranks. `groups` has the tokens of the ranks of every sequence group.
    """
    by_name = {check.what: check for check in checks(cell, sections) if check.what not in CELL_CHECKS}
    for name, check in by_name.items():
        if check.reason == NOT_RUN:
            by_name[name] = replace(
                check, reason=NEVER_CHECKED.get(name, "never compared in an observed loop")
            )
    by_name["tokens"] = _tokens_check(cell, groups)
    alone = "there is one rank" if cell.cluster.world_size == 1 else "no two ranks hold the same parameters"
    by_name.setdefault("replicas", Check(what="replicas", against="one another", reason=alone))
    ranks = [[*group[0].group] for group in groups]
    return [*by_name.values(), _objective_check(cell, objectives, ranks)]


def _cell_mistake(cell: Cell, sections: Sections, groups: Sequence[Sequence[ShardTokens]]) -> str | None:
    """Return the message of the first gate that fails; wrong attention of documents says what they are."""
    wrong = first_failure(cell, sections)
    if wrong is None or not wrong.startswith("attention") or not any(map(restarts, groups)):
        return wrong
    return (
        f"{wrong}. Positions restart within the sequence, so attention must stay within each run of"
        " positions; if the sequence is one text, let its positions count through"
    )


def group_mistake(cell: Cell, sections: Sections) -> str | None:
    """Return a message if attention communicates although `observe` got no sequence group."""
    engagement = sections.get("engagement")
    sent = 0 if engagement is None else sum(engagement.sent_bytes.get("attention", ()))
    if cell.sp_degree > 1 or sent == 0:
        return None
    return (
        f"attention sent {sent:,} bytes between ranks in a step, but bench.observe was given no sequence"
        " group, so nothing that ranks share was compared; pass the group of the ranks that share a sequence:"
        " bench.observe(model, sequence_group)"
    )


def _objective_check(
    cell: Cell, objectives: Sequence[RankObjective], groups: Sequence[Sequence[int]]
) -> Check:
    """Return the check of labels, weights and loss of one step, or why it was not made."""
    reason = reason_not_compared(objectives, groups, cell.dtype)
    if reason is not None:
        return Check(what="objective", against=NEXT_TOKENS, reason=reason)
    scale = "" if has_known_scale(objectives, cell.dtype) else ", gradients up to a factor"
    return Check(what="objective", against=f"{NEXT_TOKENS}{scale}", tokens=cell.seq_len, steps=1)


def _tokens_check(cell: Cell, groups: Sequence[Sequence[ShardTokens]]) -> Check:
    """Return the check of the last untimed step's positions and token ids, or why it was not made."""
    check = Check(what="tokens", against="one whole sequence, split over the ranks")
    if len(groups[0]) == 1:
        return replace(check, reason="no ranks share a sequence, and data of a user's loop is not checked")
    if any(find_places([shard.positions for shard in group]) is None for group in groups):
        return replace(check, reason="the positions do not determine the order of the sequence")
    return replace(check, tokens=cell.seq_len, steps=1)
