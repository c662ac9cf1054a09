"""From what the ranks of somebody's own loop report to a record. No torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.common.environment import REPOSITORY, git
from bench.config import Cell, ConfigError
from bench.cost.memory import MemoryNeed, memory_need
from bench.extras.observe.objective import RankObjective, has_known_scale, not_compared, wrong_objective
from bench.extras.observe.tokens import LoopReport, RankTokens, is_packed, misfed
from bench.measure import Sections, checks, first_failure, merge
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN
from bench.plan.planned import PlannedCell
from bench.record.record import Record, Role
from bench.record.store import Store, read_records
from bench.run.cell.ends import classify
from bench.run.cell.outcome import failed, flaw_of_a_rank, judged, refused
from bench.run.node.ranks import RankEnd
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS


def observed_record(
    cell: Cell,
    reports: Sequence[LoopReport],
    groups: Sequence[Sequence[RankTokens]],
    repeat: int,
    wall_s: float,
    started_at: datetime,
) -> Record:
    """The record of a loop that ran to the end of its observation; `groups` are what sharers were fed."""
    planned = PlannedCell(cell, repeat, repeat, Role.OBSERVED, need=need_of_loop(cell))
    uneven = _uneven(reports)
    if uneven is not None:
        return refused(planned, uneven, wall_s, started_at)
    ranks = [each.report for each in reports]
    sections = merge(ranks, cell)
    misfeeding = next(filter(None, map(misfed, groups)), None)
    unchecked = None if misfeeding else _other_layers(reports)
    if unchecked is not None:
        return refused(planned, unchecked, wall_s, started_at)
    objectives = [each.objective for each in reports]
    lost = [each.stated_not_finite for each in reports if each.stated_not_finite is not None]
    wrong = (
        forgotten_group(cell, sections)
        or misfeeding
        or (min(lost)[1] if lost else None)
        or first_failure(cell, sections)
        or flaw_of_a_rank(ranks, range(len(ranks)))
        or wrong_objective(objectives, [[*group[0].group] for group in groups], cell.dtype)
    )
    made = checks_of_loop(cell, sections, groups, objectives)
    return judged(planned, ranks, sections, made, wrong, wall_s, started_at)


def need_of_loop(cell: Cell) -> MemoryNeed | None:
    """Return the bytes that a rank needs; None where the loop's strategy or engine has no formula."""
    has_formula = cell.strategy in STRATEGIES and cell.engine.name in ENGINE_FACTS
    return memory_need(cell) if has_formula else None


def failed_record(cell: Cell, end: RankEnd, wall_s: float, started_at: datetime) -> Record:
    """The record of a loop that an error ended, as the rank knows it that met the error."""
    status, failure = classify([end])
    assert failure is not None
    return failed(PlannedCell(cell, 0, 0, Role.OBSERVED), status, failure, wall_s, started_at)


def kept(record: Record, store: Store) -> Record:
    """Store the record with the observed script in place of our own command line, and return it.

    Once: several ranks may meet the same error.
    """
    record = replace(record, environment=replace(record.environment, **this_script()))
    same = (record.cell_id, record.started_at)
    if all((other.cell_id, other.started_at) != same for other in store.read()):
        store.append(record)
    return record


def this_script() -> dict[str, Any]:
    """Return the facts about the script that a record's `environment` holds next to the harness's commit."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return script_facts(Path(file) if file else None, sys.argv)


def script_facts(script: Path | None, argv: Sequence[str]) -> dict[str, Any]:
    """Return `script_commit`, `script_dirty` and `argv`; null where the script lies in no repository.

    Paths in the repository start at its root. Other paths are reduced to the name, as they may name a user.
    """
    folder = None if script is None else script.resolve().parent
    top = None if folder is None else git(folder, "rev-parse", "--show-toplevel")
    root = None if top is None else Path(top)
    commit = None if root is None else git(root, "rev-parse", "HEAD")
    changes = None if root is None or commit is None else git(root, "status", "--porcelain")
    return {
        "script_commit": commit,
        "script_dirty": None if changes is None else bool(changes),
        "argv": [_shortened(word, root) for word in argv],
    }


def _shortened(word: str, root: Path | None) -> str:
    """An argument, or what stands after its first `=`, without the folders of this machine."""
    name, sign, value = word.rpartition("=") if word.count("=") == 1 else ("", "", word)
    path = Path(value)
    if not path.is_absolute():
        return word
    if root is not None and path.is_relative_to(root):
        return f"{name}{sign}{path.relative_to(root)}"
    return f"{name}{sign}.../{path.name}"


def sharing(reports: Sequence[LoopReport]) -> list[list[RankTokens]]:
    """What the ranks were fed, by the sequence that they share."""
    ranks = [each.tokens for each in reports]
    return [
        [ranks[member] for member in group] for group in dict.fromkeys(tuple(each.group) for each in ranks)
    ]


def _uneven(reports: Sequence[LoopReport]) -> str | None:
    """Why no step's time stands for the others': ranks or steps were fed batches of other sizes."""
    sizes = sorted({size for each in reports for size in each.sizes})
    if len(sizes) == 1:
        return None
    met = ", ".join(f"{batch} x {length} tokens in {calls} calls" for batch, length, calls in sizes[:3])
    return (
        f"ranks or steps were fed different sizes ({met}), so step times cannot be compared; pad all batches"
        " to one size"
    )


def _other_layers(reports: Sequence[LoopReport]) -> str | None:
    """Why nothing vouches for a sequence that ranks share: layers of a kind that no check here compares."""
    found = dict.fromkeys(each for report in reports for each in report.other_layers)
    if not found or len(reports[0].tokens.group) == 1:
        return None
    return (
        f"ranks share a sequence, and {'; '.join(found)}: whether such layers see across shards as on one"
        " device is not checked here; compare the loss of each position with one device, or share no sequence"
    )


def check_records(folder: Path) -> None:
    """Raises what says that the folder's records cannot be added to: now, not after the training.

    ConfigError where nothing can be written there, StoreError where its records cannot be read.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"bench.observe: folder={folder}: cannot be written to ({error.strerror or error}); name another"
            " with folder="
        ) from None
    if (folder / "records.jsonl").exists():
        read_records(folder / "records.jsonl")


def report(folder: Path) -> None:
    """Tables, figures and page, by a process of their own: a training script need not import all that."""
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [sys.executable, "-m", "analysis.report", str(folder.absolute())], cwd=REPOSITORY, check=False
    )


UNKNOWN: Mapping[str, str] = {
    "losses and gradient norms": "the loop's own are not kept",
    "training signal": "no other computation of this loop is known",
}
"""Why a check is never made of a loop."""
NOT_IN_A_LOOP = "never compared in an observed loop"
"""Why any other check is not made whose pass left no section."""
OF_CELLS = frozenset({
    "every gradient on the cell's engine", "every shard of the parameters",
})  # fmt: skip
"""Checks on data or an optimizer of ours, which have no meaning for a loop: `objective` stands for them."""
NEXT_TOKENS = "the mean loss of next tokens"


def checks_of_loop(
    cell: Cell,
    sections: Sections,
    groups: Sequence[Sequence[RankTokens]],
    objectives: Sequence[RankObjective],
) -> list[Check]:
    """The passes' checks, with reasons that hold for a loop.

    `groups` say what was fed to the ranks that share a sequence, `objectives` by rank what it trained on.
    """
    found = {check.what: check for check in checks(cell, sections) if check.what not in OF_CELLS}
    for what, check in found.items():
        if check.reason == NOT_RUN:
            found[what] = replace(check, reason=UNKNOWN.get(what, NOT_IN_A_LOOP))
    found["tokens"] = _tokens(cell, groups)
    alone = "there is one rank" if cell.cluster.world_size == 1 else "no two ranks hold the same parameters"
    found.setdefault("replicas", Check(what="replicas", against="one another", reason=alone))
    return [*found.values(), _objective(cell, objectives)]


def forgotten_group(cell: Cell, sections: Sections) -> str | None:
    """Why it is wrong that no ranks share a sequence: attention itself exchanges something."""
    engagement = sections.get("engagement")
    sent = 0 if engagement is None else sum(engagement.sent_bytes.get("attention", ()))
    if cell.sp_degree > 1 or sent == 0:
        return None
    return (
        f"attention exchanged {sent:,} bytes between ranks in a step, but no ranks were said to share a"
        " sequence, so nothing of it was compared; hand over the group of those that do:"
        " bench.observe(model, sequence_group)"
    )


def _objective(cell: Cell, seen: Sequence[RankObjective]) -> Check:
    """Labels, weights and the value of one step's loss."""
    unknown = not_compared(seen, cell.sp_degree, cell.dtype)
    if unknown is not None:
        return Check(what="objective", against=NEXT_TOKENS, reason=unknown)
    scale = "" if has_known_scale(seen, cell.dtype) else ", gradients but for a factor"
    return Check(what="objective", against=f"{NEXT_TOKENS}{scale}", tokens=cell.seq_len, steps=1)


def _tokens(cell: Cell, groups: Sequence[Sequence[RankTokens]]) -> Check:
    """Positions and token ids of the last step that was looked at, where ranks share a sequence."""
    check = Check(what="tokens", against="one whole sequence, dealt out")
    if len(groups[0]) == 1:
        return replace(check, reason="no ranks share a sequence, and the loop's data is its own")
    if any(map(is_packed, groups)):
        return replace(check, reason="positions start anew within a sequence, as in packed documents")
    return replace(check, tokens=cell.seq_len, steps=1)
