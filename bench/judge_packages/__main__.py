"""What the installed packages can do: `python -m bench.judge_packages`; some ten minutes on two idle cores.

Every strategy of a package runs small cells through the gates, also those that we would refuse beforehand.
Exits 1 where one does not run though nothing here refuses it: then its facts are out of date. Exits 1, too,
where a package is wrong and the page does not say how to see that without us.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.cell.planned import PlannedCell
from bench.cell.run import SharedSections, measure
from bench.command import tool_words
from bench.config import ConfigError, ExitCode
from bench.environment import Machine, installed, this_machine
from bench.judge_packages.page import Answer, Answers, page, unexpected
from bench.judge_packages.questions import BASE, CHOICES, Subject, subjects
from bench.judge_packages.verdict import Verdict, verdict_of
from bench.node.lease import add_lease_option, lease_of
from bench.request.legality import refusal

MODULE = "bench.judge_packages"


def main(words: Sequence[str] | None = None) -> None:
    """Print an answer a line, write the page, and say what was not expected."""
    arguments = _arguments(words)
    try:
        answers = _answers(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    if arguments.output is not None:
        machine = f"torch {installed('torch')}, gloo"
        arguments.output.write_text(page(answers, tool_words(MODULE), machine))
        print(f"written to {arguments.output}")
    faults = [*unexpected(answers)]
    print("\n".join(faults) if faults else "what is not refused runs")
    sys.exit(ExitCode.FAILED if faults else ExitCode.OK)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words(MODULE), description=__doc__)
    parser.add_argument("--strategies", default="", help="some of them, with commas; all that have a package")
    parser.add_argument("--output", type=Path, help="the page to write, as docs/implementations.md")
    add_lease_option(parser)
    return parser.parse_args(words)


def _answers(arguments: argparse.Namespace) -> list[tuple[Subject, Answers]]:
    names = arguments.strategies
    asked = [*subjects(tuple(names.split(",")) if names else ())]
    if not asked:
        raise ConfigError(f"--strategies {names}: none of them is a package's; leave it out for all that are")
    launcher, machine = Launcher(), this_machine()
    with lease_of(arguments, [asked[0].cell(BASE, machine)]):
        return [(subject, _told(subject, launcher, machine)) for subject in asked]


def _told(subject: Subject, launcher: Launcher, machine: Machine) -> Answers:
    found = {}
    for choice in CHOICES:
        found[choice] = answer(subject, choice, launcher, machine)
        verdict = found[choice].verdict
        print(f"{subject.name}, {choice}: {verdict.word} {verdict.why}".rstrip(), flush=True)
    return found


def answer(subject: Subject, choice: str, launcher: Launcher, machine: Machine) -> Answer:
    """What becomes of the cell, in fresh ranks, whether we would refuse it or not.

    Nothing runs without the package, or where it would not be told.
    """
    cell, facts = subject.cell(choice, machine), subject.facts
    refused, untold = refusal(cell), facts.untold(cell)
    if facts.package is not None and installed(facts.package) is None:
        return Answer(Verdict("absent", f"install it with: {facts.install}"), refused)
    if untold is not None:
        return Answer(Verdict(*untold), refused)
    with tempfile.TemporaryDirectory() as folder:
        planned = PlannedCell(cell, repeat=0, order=0)
        record = measure(planned, launcher, Path(folder), shared=SharedSections())
    return Answer(verdict_of(record, cell), refused)


if __name__ == "__main__":
    main()
