"""The answers as a page: a table, and below it whose words they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.environment import installed
from bench.judge_packages.questions import CHOICES, Subject
from bench.judge_packages.verdict import Verdict

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

ROUNDED_TO_BF16 = (
    "on two GPUs call the package's contiguous ring (`ring_flash_attn_func`; of yunchang's USP"
    ' `LongContextAttention(ring_impl_type="basic")`) on fp16 `q`, `k` and `v` and go backward. Then'
    " `(q.grad.bfloat16().half() == q.grad).all()` is true: its backward ends"
    " `return dq.to(torch.bfloat16), ...`, which takes three bits from each number."
)
AUTOCAST = (
    "on two CPU ranks call `ringmaster.ring.p2p_attn.ring_p2p_attention(q, k, v, group=dist.group.WORLD,"
    " causal=True, scaling=None)` on bf16 tensors of shape [1, 4, 128, 16], once under"
    ' `torch.autocast("cpu", torch.bfloat16)` and once without: against float64, the first errs several times'
    " as much. This is the package's path for a CPU; a GPU never takes it."
)
WITHOUT_US: Mapping[tuple[str, str], str] = {
    ("ring_flash_attn", "fp16"): ROUNDED_TO_BF16,
    ("yunchang_ring", "fp16"): ROUNDED_TO_BF16,
    ("yunchang_usp", "fp16"): ROUNDED_TO_BF16,
    ("ringmaster_ring", "ddp"): AUTOCAST,
    ("ringmaster_usp", "ddp"): AUTOCAST,
}
"""How to see without this project what a package computes wrongly, by strategy and choice."""


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
            cell, verdict = f"{subject.name}, {choice}", answer.verdict
            if answer.is_unexpected:
                yield f"{cell}: {verdict.word}, not refused here: {verdict.why}"
            if verdict.word == "wrong" and (subject.facts.name, choice) not in WITHOUT_US:
                yield f"{cell}: wrong, and WITHOUT_US in {__name__} does not say how to see that without us"


def _ways_to_see(answers: Sequence[tuple[Subject, Answers]]) -> list[str]:
    """A section that says of each `wrong` how to see it without us, in the table's order."""
    named: dict[str, dict[str, None]] = {}
    for subject, found in answers:
        for choice, answer in found.items():
            way = WITHOUT_US.get((subject.facts.name, choice))
            if answer.verdict.word == "wrong" and way is not None:
                named.setdefault(way, {})[f"`{subject.facts.name}`, {choice}"] = None
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
