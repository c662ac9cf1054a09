"""Records of observed loops with their checks, and messages why a loop is wrong or not judged."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from bench.common.environment import REPOSITORY
from bench.config import Cell, ConfigError
from bench.extras.observe.objective import ObjectiveVerdict, judge_objective
from bench.extras.observe.sharding import (
    equal_tokens_line,
    group_mistake,
    packed_documents,
    sequence_groups,
    sharding_mistake,
    token_holders,
    why_not_split,
)
from bench.extras.observe.tokens import LoopReport
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

KEPT_CHECKS = ("rotary positions", "replicas")
"""Checks of passes that loops have in common with cells."""
NEXT_TOKENS = "the gradient of the logits on one device, of the mean loss of next tokens"


def observed_record(
    cell: Cell, reports: Sequence[LoopReport], repeat: int, wall_s: float, started_at: datetime
) -> Record:
    """Return the record of a loop that ran all steps of its observation.

    `reports` are those of all ranks, in rank order. `repeat` is the number of earlier records of this cell.
    """
    planned = PlannedCell(cell, repeat, repeat, Role.OBSERVED)
    sizes = sorted({size for report in reports for size in report.step_sizes})
    if len(sizes) > 1:
        refusal = (
            f"ranks or steps had batches of different sizes ({', '.join(sizes[:3])}), so step times"
            " cannot be compared; pad all batches to one size"
        )
        return unsupported_record(planned, refusal, wall_s, started_at)
    ranks, groups = [report.rank_report for report in reports], sequence_groups(reports)
    sections = merge_reports(ranks, cell)
    updates = sections["updates"]
    if updates is not None and updates.unequal and equal_tokens_line(reports):
        # They may be parts of parameters, under tensor parallelism that is written by hand.
        sections["updates"] = replace(updates, unequal={}, replicas=0)
    if not all(report.tokens.counts_from_zero for report in reports):
        sections["positions"] = None  # compared on some ranks only
    firsts = {ranks[0] for ranks in token_holders(reports)}
    distinct = [group for group in groups if group[0].group[0] in firsts]
    sections["documents"] = packed_documents(cell, distinct)
    attention, engagement = sections.get("full_length"), sections.get("engagement")
    sent = 0 if engagement is None else sum(engagement.sent_bytes.get("attention", ()))
    is_compared = attention is not None and attention.reason is None
    shows_documents = is_compared and sent > 0 and first_failure(cell, {"full_length": attention}) is None
    group_ranks = [[*group[0].group] for group in groups]
    objective = judge_objective([report.objective for report in reports], group_ranks, cell.dtype)
    gates = {name: section for name, section in sections.items() if name != "engagement"}
    wrong = first_failure(cell, gates)
    if wrong is not None and wrong.startswith("attention") and sections["documents"] is not None:
        wrong += (
            ". Positions restart within the sequence, so attention must stay within each run of positions; if"
            " the sequence is one text, let its positions count through"
        )
    may_be = shows_documents or not is_compared
    sharding = (sharding_mistake(group, may_be_documents=may_be) for group in groups)
    wrong = (
        group_mistake(reports)
        or next(filter(None, sharding), None)
        or wrong
        or first_rank_flaw(ranks, range(len(ranks)))
        or objective.mistake
    )
    made = loop_checks(cell, reports, sections, objective, shows_documents=shows_documents)
    return completed_record(planned, ranks, sections, made, wrong, wall_s, started_at)


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
    """Store the record and return it, with absolute paths in `argv` reduced to their last part.

    A failure is not stored if the same run has another one: several ranks may raise the same error.
    """
    argv = [re.sub(r"^([^=/]*=)?/.*/", r"\1.../", word) for word in sys.argv]
    record = replace(record, environment=replace(record.environment, argv=argv))
    key = (record.cell_id, record.started_at)
    failures = (stored for stored in store.read() if stored.failure is not None)
    if record.failure is None or all((stored.cell_id, stored.started_at) != key for stored in failures):
        store.append(record)
    return record


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


def loop_checks(
    cell: Cell,
    reports: Sequence[LoopReport],
    sections: Sections,
    objective: ObjectiveVerdict,
    *,
    shows_documents: bool,
) -> list[Check]:
    """Return the checks of a loop, made or with the reason why not.

    `sections` are merged over all ranks. `shows_documents` says that attention was seen to stay within
    documents.
    """
    groups, attention = sequence_groups(reports), sections.get("full_length")
    attention_reason = reports[0].objective.reason if attention is None else attention.reason
    kept = [check for check in checks(cell, sections) if check.what in KEPT_CHECKS]
    kept = [replace(check, reason=attention_reason) if check.reason == NOT_RUN else check for check in kept]
    if not any(check.what == "replicas" for check in kept):
        alone = "no two ranks are seen to hold the same parameters"
        kept.append(Check(what="replicas", against="one another", reason=alone))
    not_split = why_not_split(groups, shows_documents=shows_documents)
    scale = "" if objective.is_scale_known else ", up to a factor"
    return [
        _check("tokens", "positions of whole sequences, split over the ranks", not_split, cell.seq_len),
        _check("attention of one layer", "float64", attention_reason, cell.seq_len),
        *kept,
        _check("objective", f"{NEXT_TOKENS}{scale}", objective.reason, cell.seq_len),
    ]


def _check(what: str, against: str, reason: str | None, tokens: int | None) -> Check:
    """Return a check of one step, or one that was not made for a reason."""
    if reason is not None:
        return Check(what=what, against=against, reason=reason)
    return Check(what=what, against=against, tokens=tokens, steps=1)
