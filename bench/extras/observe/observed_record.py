"""Records of observed loops with their checks, and messages why a loop is wrong or not judged."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.common.environment import REPOSITORY
from bench.config import Cell
from bench.extras.observe import sharding
from bench.extras.observe.loop import COMPILED
from bench.extras.observe.objective import ObjectiveVerdict, judge_objective
from bench.extras.observe.tokens import LoopReport
from bench.measure import Sections, checks, first_failure, merge_reports
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN
from bench.plan.planned import PlannedCell
from bench.record.record import Record, Role
from bench.record.store import Store
from bench.run.cell.outcome import completed_record, first_rank_flaw, unsupported_record
from bench.run.node.stacks import PACKAGES_PATH, Frame

NEXT_TOKENS = "the gradient of the logits on one device, of the mean loss of next tokens"


def observed_record(
    cell: Cell, reports: Sequence[LoopReport], repeat: int, wall_s: float, started_at: datetime
) -> Record:
    """Return the record of a loop that ran all steps of its observation.

    `reports` are those of all ranks, in rank order. `repeat` is the number of earlier records of this cell.
    """
    planned = PlannedCell(cell, repeat, repeat, Role.OBSERVED)
    sizes = sorted({size for report in reports for size, _ in report.untimed_steps})
    if len(sizes) > 1:
        refusal = (
            f"ranks or steps had batches of different sizes ({', '.join(sizes[:3])}), so step times"
            " cannot be compared; pad all batches to one size"
        )
        return unsupported_record(planned, refusal, wall_s, started_at)
    ranks, groups = [report.rank_report for report in reports], sharding.sequence_groups(reports)
    sections = merge_reports(ranks, cell)
    updates, engagement, attention = (sections[name] for name in ("updates", "engagement", "full_length"))
    if updates is not None and updates.unequal and sharding.equal_tokens_line(reports):
        # They may be parts of parameters, under tensor parallelism that is written by hand.
        sections["updates"] = replace(updates, unequal={}, replicas=0)
    if not all(report.tokens.counts_from_zero for report in reports):
        sections["positions"] = None  # compared on some ranks only
    firsts = {holders[0] for holders in sharding.token_holders(reports)}
    sections["documents"] = sharding.packed_documents(
        cell, [group for group in groups if group[0].group[0] in firsts]
    )
    is_compared = attention is not None and attention.reason is None
    communicates = engagement is not None and sum(engagement.sent_bytes.get("attention", ())) > 0
    shows_documents = is_compared and communicates and first_failure(cell, {"full_length": attention}) is None
    objective = judge_objective(
        [report.objective for report in reports], [group[0].group for group in groups], cell.dtype
    )
    wrong = first_failure(cell, sections | {"engagement": None})
    if wrong is not None and wrong.startswith("attention") and sections["documents"] is not None:
        wrong += (
            ". Positions restart within the sequence, so attention must stay within each run of positions; if"
            " the sequence is one text, let its positions count through"
        )
    may_be = shows_documents or not is_compared
    splits = (sharding.sharding_mistake(group, may_be_documents=may_be) for group in groups)
    wrong = (
        sharding.group_mistake(reports)
        or next(filter(None, splits), None)
        or wrong
        or first_rank_flaw(ranks, range(len(ranks)))
        or objective.mistake
    )
    not_split = sharding.why_not_split(groups, shows_documents=shows_documents)
    made = _loop_checks(cell, sections, not_split, objective)
    return completed_record(planned, ranks, sections, made, wrong, wall_s, started_at)


def write_report(folder: Path) -> None:
    """Write tables, figures and the page in another process, so that the training imports none of it."""
    command = [sys.executable, "-m", "analysis.report", str(folder.absolute())]
    subprocess.run(command, cwd=REPOSITORY, check=False)  # noqa: S603  fixed arguments, no shell


def _loop_checks(
    cell: Cell, sections: Sections, not_split: str | None, objective: ObjectiveVerdict
) -> list[Check]:
    """Return the checks of a loop, made or not; `not_split` is the reason why tokens are not checked."""

    def check(what: str, against: str, reason: str | None) -> Check:
        extent: dict[str, Any] = {"reason": reason} if reason else {"tokens": cell.seq_len, "steps": 1}
        return Check(what=what, against=against, **extent)

    attention = sections["full_length"]
    attention_reason = COMPILED if attention is None else attention.reason
    common, not_run = checks(cell, sections), attention_reason or NOT_RUN
    replicas = [made for made in common if made.what == "replicas"]
    positions = [made for made in common if made.what == "rotary positions"]
    alone = "no two ranks are seen to hold the same parameters"
    scale = "" if objective.is_scale_known else ", up to a factor"
    return [
        check("tokens", "positions of whole sequences, split over the ranks", not_split),
        check("attention of one layer", "float64", attention_reason),
        *(replicas or [check("replicas", "one another", alone)]),
        *(replace(made, reason=not_run) if made.reason == NOT_RUN else made for made in positions),
        check("objective", f"{NEXT_TOKENS}{scale}", objective.reason),
    ]


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
    failures = [(stored.cell_id, stored.started_at) for stored in store.read() if stored.failure is not None]
    if record.failure is None or (record.cell_id, record.started_at) not in failures:
        store.append(record)
    return record
