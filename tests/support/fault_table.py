"""Print which checks find which fault, and compare with `fault_table.txt`.

`python -m tests.support.fault_table` runs every fault; names (`forget_the_mask`, `mistake=mask_off_by_one`)
restrict it to those. All take 15 minutes at most. It fails if the table differs from the file; `--write`
writes the file.

A pass that ends a faulty cell is skipped in a second run, so that later checks have their say. `compared:` is
the comparison with `local` on the same data, also of cells that fail alone.
"""

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bench.measure import PASSES, decode_reports, merge_reports
from bench.measure.facts import PassFacts
from bench.measure.losses.section import LossesSection
from bench.plan.local_cells import reference_of
from bench.plan.planned import planned_cell
from bench.plan.work import work_of
from bench.record.record import Status
from bench.record.trajectory_noise import Deviation, first_departure, movement_weight, signals_of
from bench.run.cell.ends import classify
from bench.run.cell.launcher import Launcher
from bench.run.cell.outcome import completed_record, first_rank_flaw
from bench.run.node import server
from bench.run.node.lease import VARIABLE
from bench.run.node.local import LocalNode
from bench.run.references import Trajectories
from tests.support.cells import TWO_CORES, run_cell
from tests.support.faults.classes.tampering import run_with_fault
from tests.support.faults.table import EVERY_FAULT, cell_of
from tests.support.records import matches_of

KEPT = Path(__file__).with_suffix(".txt")
AMPLE_BUDGET = "measure.reference_budget_s=600"
"""Word with which a reference ends on a busy machine, too."""
FLAWS, SIGNALS = "finite numbers", "compared: signals"
CHECKS = (
    *(name for name, facts in PASSES.items() if type(facts).gate is not PassFacts.gate),
    FLAWS,
    SIGNALS,
    *(f"compared: {name}" for name in LossesSection.__struct_fields__ if name.endswith("_match")),
    "compared: quality",
)
"""Checks in the order of a row; a cell that ends for another reason has its status there."""
FAULTS = {(fault.__name__, " ".join(words) or "-"): (fault, words) for fault, words, _ in EVERY_FAULT}
ROW = "{{:{}}}  {{:{}}}  {{:5}}  {{}}".format(
    *(max(map(len, column)) for column in zip(*FAULTS, strict=True))
)


class FaultRuns:
    """Runs of faults on the same launcher, with one reference for all cells of equal work."""

    def __init__(self, launcher, folder):
        self.launcher = launcher
        self.folder = Path(folder)
        self.trajectories = Trajectories()
        self.references = {}

    def checks_that_find(self, fault, words):
        cell = cell_of((*words, AMPLE_BUDGET))
        planned = planned_cell(cell, TWO_CORES)
        entry, found = partial(run_with_fault, fault), set()
        while True:
            folder = self.folder / planned.folder_name
            ends = self.launcher.run(cell, folder, entry=entry, skipped_passes=frozenset(found))
            status, failure = classify(ends)
            if failure is None:
                break
            if status is not Status.WRONG_RESULT or failure.phase not in PASSES.keys() - found:
                return [*in_order(found), status.value]
            found.add(failure.phase)
        reports = decode_reports([end.report for end in ends])
        sections = merge_reports(reports, cell)
        filled = {name: section for name, section in sections.items() if section is not None}
        found |= {name for name, section in filled.items() if PASSES[name].gate(cell, section)}
        record = completed_record(planned, reports, sections, [], None, 0.0, datetime.now(UTC))
        if record.status is not Status.OK or first_rank_flaw(reports, cell.running_ranks):
            found.add(FLAWS)
        return in_order(found.union(self._departures(cell, replace(record, status=Status.OK))))

    def _departures(self, cell, record):
        """Yield the comparisons with `local` that find a fault in a record."""
        if not cell.workload.trains:
            return
        reference = self._reference(cell)
        record = self.trajectories.compare(cell, record)
        limit, steps = Deviation(**record.losses.compared_within), record.losses.compared_steps
        signals, expected = signals_of(record.losses, steps), signals_of(reference.losses, steps)
        if first_departure(signals, expected, limit, movement_weight(cell.dtype, limit)):
            yield SIGNALS
        yield from (f"compared: {name}" for name, match in matches_of(record) if not match.is_within)

    def _reference(self, cell):
        work = work_of(cell)
        if work not in self.references:
            reference = reference_of(cell)
            record, _ = run_cell(self.launcher, reference, self.folder)
            assert record.status is Status.OK, record.reason
            self.references[work] = self.trajectories.compare(reference, record)
        return self.references[work]


def in_order(found):
    return [name for name in CHECKS if name in found]


def row(key, found):
    return ROW.format(*key, "alone" if len(found) == 1 else "-", ", ".join(found) or "-")


def table(found):
    """Return the rows of the faults that ran, and for each check the number of faults that it finds."""
    rows = [row(key, found[key]) for key in FAULTS if key in found]
    counts = Counter(name for names in found.values() for name in names)
    alone = Counter(names[0] for names in found.values() if len(names) == 1)
    sums = [f"{name:26}  {counts[name]:6}  {alone[name]:5}" for name in dict.fromkeys((*CHECKS, *counts))]
    head = ROW.format("fault", "words", "alone", "checks that find it")
    return "\n".join([head, *rows, "", f"{'check':26}  faults  alone", *sums, ""])


def kept_rows(text):
    """Return the checks that find each fault, as a table has them."""
    rows = [re.split(" {2,}", line) for line in text.partition("\n\n")[0].splitlines()[1:]]
    return {(name, words): [] if checks == "-" else checks.split(", ") for name, words, _, checks in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="FAULT")
    parser.add_argument("--write", action="store_true", help=f"write {KEPT.name}")
    arguments = parser.parse_args()
    names = {*arguments.names}
    wanted = {key: case for key, case in FAULTS.items() if not names or names & {key[0], *case[1]}}
    if not wanted:
        parser.error(f"no fault is called {' or '.join(sorted(names))}")
    kept = KEPT.read_text() if KEPT.exists() else ""
    found = {key: checks for key, checks in kept_rows(kept).items() if key in FAULTS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder  # no lease is shared with sweeps, as no time is measured
        server.PRELOAD = "tests.support.preloaded"
        LocalNode().import_all()
        runs = FaultRuns(Launcher(), folder)
        for key, case in wanted.items():
            found[key] = runs.checks_that_find(*case)
            print(row(key, found[key]), flush=True)
            if arguments.write:
                KEPT.write_text(table(found))
    text = table(found)
    print(text.partition("\n\n")[2])
    if text != kept and not arguments.write:
        sys.stdout.writelines(
            difflib.unified_diff(kept.splitlines(True), text.splitlines(True), KEPT.name, "now")
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
