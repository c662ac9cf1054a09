"""The answers as a page: a table, and below it whose words they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.environment import installed
from bench.judge_packages.questions import CHOICES, Subject
from bench.judge_packages.verdict import Verdict
from bench.judge_packages.without_us import WITHOUT_US

INTRODUCTION = """\
# What the packages can do

Made by `{command} --output docs/implementations.md`. To judge another version of a package, install it and
run this. {machine}; 2 CPU ranks (4 for USP, 2 x 2), 256 tokens, 4 query heads. One thing at a time is
changed from bf16, 4 query and 2 KV heads and a causal mask: of attention alone up to the full mask, of a
training step after it. Cells that a sweep would refuse are run, too. All go through the gates of every cell.

- `runs`: it passed every gate. A dagger: a sweep refuses it all the same, as `unsupported`.
- `wrong`: the package's own functions give a wrong number. The last section says how to see it without us.
- `refuses`: the package says that it cannot. `fails`: it ends otherwise. `absent`: it is not installed.
- `not asked`: the package has no argument for it, or is not written for such input. Nothing was run.
- `not offered here`: the package may do it, and our adapter lacks it. Nothing was run.
- `unexplained`: it sent other bytes than our formula says, and no gate found a wrong number. In a sweep this
  is a `wrong_result` without a speed: nothing shows there that what was asked for ran.

A number is that of the words below the table. Where flash-attn is not installed, a stand-in with its
functions computes. It runs on a CPU and takes float32, which flash-attn does not.
"""

WITHOUT_US_IS_IN = "bench/judge_packages/without_us.py"


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found of one cell, and what we would have said of it."""

    verdict: Verdict
    refusal: str | None
    """Why it is `unsupported` here; None where it is not."""

    @property
    def is_unexpected(self) -> bool:
        """Whether it does not run though nothing here refuses it."""
        return not self.verdict.runs and self.refusal is None


Answers = Mapping[str, Answer]
"""By the choice."""


def page(answers: Sequence[tuple[Subject, Answers]], command: str, machine: str) -> str:
    """The whole page as markdown."""
    notes: dict[str, int] = {}
    header = ["package", "strategy", "choices", *CHOICES]
    rows = [_row(subject, found, notes) for subject, found in answers]
    lines = [
        INTRODUCTION.format(command=command, machine=machine),
        _line(header),
        _line(["---"] * len(header)),
        *map(_line, rows),
        "",
        *(f"{number}. {note}" for note, number in notes.items()),
        *_ways_to_see(answers),
    ]
    return "\n".join(lines) + "\n"


def unexpected(answers: Sequence[tuple[Subject, Answers]]) -> Iterator[str]:
    """A line for each cell that does not run though nothing here refuses it, or is wrong unseen by others."""
    for subject, found in answers:
        for choice, answer in found.items():
            words = " ".join((subject.facts.name, *subject.words))
            if answer.is_unexpected:
                yield f"{words}, {choice}: {answer.verdict.word}, not refused here: {answer.verdict.why}"
            if answer.verdict.word == "wrong" and (subject.facts.name, choice) not in WITHOUT_US:
                where = f"{WITHOUT_US_IS_IN} does not say how to see that without us"
                yield f"{words}, {choice}: wrong, and {where}"


def _ways_to_see(answers: Sequence[tuple[Subject, Answers]]) -> list[str]:
    """A section that says of each `wrong` how to see it without us, in the table's order."""
    wrong = [
        (subject.facts.name, choice)
        for subject, found in answers
        for choice, answer in found.items()
        if answer.verdict.word == "wrong"
    ]
    named: dict[str, list[str]] = {}
    for name, choice in dict.fromkeys(wrong):
        if (name, choice) in WITHOUT_US:
            named.setdefault(WITHOUT_US[name, choice], []).append(f"`{name}`, {choice}")
    lines = [f"- {'; '.join(cells)}: {way}" for way, cells in named.items()]
    return ["", "## How to see each `wrong` without this project", "", *lines] if lines else []


def _row(subject: Subject, found: Answers, notes: dict[str, int]) -> list[str]:
    package = subject.facts.package or ""
    version = installed(package) or ""
    choices = ", ".join(word.rpartition("=")[2] for word in subject.words)
    cells = [_cell(found[choice], notes) if choice in found else "" for choice in CHOICES]
    return [f"{package} {version}".strip(), f"`{subject.facts.name}`", choices, *cells]


def _cell(answer: Answer, notes: dict[str, int]) -> str:
    """`runs`, `runs †3`, `wrong 4`: the number is that of the package's words, or of ours where it runs."""
    verdict, refused = answer.verdict, answer.refusal or ""
    note = refused if verdict.runs else verdict.why
    mark = "†" if verdict.runs and refused else ""
    if not note:
        return verdict.word
    return f"{verdict.word} {mark}{notes.setdefault(_plain(note), len(notes) + 1)}"


def _plain(note: str) -> str:
    """Nothing in it is markdown."""
    return note.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
