"""What is to be thought of each published number: `python -m analysis.claims [FOLDER...]`.

A folder is a sweep's: its measured records overrule the cost model. Without one the model alone speaks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from analysis.answers.published import counts_line
from analysis.frame.archive import read_archive
from analysis.frame.load import peak_flops_per_s
from analysis.labels import count_label
from analysis.published.comparable import Comparable
from analysis.published.model import CostModel
from analysis.published.opinion import Verdict
from analysis.published.registry import Claim, Registry, read_registry
from analysis.published.verdicts import Judgement, judged, nearest_record
from bench.command import tool_words
from bench.config import ConfigError, ExitCode
from bench.store import StoreError, warn_in_one_line

INDENTED = (0, 0, 0, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    chosen = _parser().parse_args(arguments)
    warn_in_one_line()
    try:
        measured = Comparable.of(read_archive(chosen.folders, peak_flops_per_s()).frame)
        registry = read_registry()
        _refuse_none(registry, chosen)
        found = judged(registry, CostModel(), measured, partial(_is_wanted, chosen))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    shown = [
        (each, nearest_record(each, measured)) for each in found if chosen.verdict in (None, each.verdict)
    ]
    (_print_json if chosen.json else _print_text)(shown)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=tool_words("analysis.claims"), description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="a sweep's folder")
    parser.add_argument("--id", metavar="PATTERN", help="only claims of such ids, as in 'hf-*'")
    parser.add_argument("--group", help="only claims of this group, as in alst")
    parser.add_argument("--verdict", choices=[*Verdict], help="only claims of this verdict")
    parser.add_argument("--json", action="store_true", help="one JSON object a claim and line")
    return parser


def _refuse_none(registry: Registry, chosen: argparse.Namespace) -> None:
    """Raises ConfigError for a group or an id that no claim has."""
    groups = sorted({claim.group for claim in registry.claims})
    if chosen.group is not None and chosen.group not in groups:
        raise ConfigError(f"--group {chosen.group}: no such group of claims; take one of {', '.join(groups)}")
    if not any(_is_wanted(chosen, claim) for claim in registry.claims):
        raise ConfigError(f"--id {chosen.id}: no claim has such an id; leave it out to see them all")


def _is_wanted(chosen: argparse.Namespace, claim: Claim) -> bool:
    is_of_group = chosen.group in (None, claim.group)
    return is_of_group and (chosen.id is None or fnmatchcase(claim.id, chosen.id))


Told = tuple[Judgement, str | None]
"""A judgement, and in what the nearest record is another than its claim's."""


def _print_text(found: Sequence[Told]) -> None:
    """In a pipe each reason stays in one line, to be searched."""
    console = Console(highlight=False)
    for each, nearest in found:
        console.print(Text(f"{each.claim.id}: {each.verdict}", style="bold"), soft_wrap=True)
        for line in _lines(each, nearest):
            if console.is_terminal:
                console.print(Padding(Text(line), INDENTED))
            else:
                print(f"    {line}")
    judgements = [each for each, _ in found]
    console.print(Text(f"{count_label(len(found), 'claim')}: {counts_line(judgements)}"), soft_wrap=True)


def _lines(each: Judgement, nearest: str | None) -> Iterable[str]:
    """Why, and what of the set-ups differs that the reason has not named."""
    yield each.why
    rest = [str(difference) for difference in each.differences if str(difference) not in each.why]
    if rest:
        yield f"set-up: {'; '.join(rest)}"
    if nearest:
        yield nearest


def _print_json(found: Sequence[Told]) -> None:
    for each, nearest in found:
        print(json.dumps(_as_json(each, nearest)))


def _as_json(each: Judgement, nearest: str | None) -> dict[str, Any]:
    return {
        "id": each.claim.id,
        "verdict": each.verdict,
        "why": each.why,
        "differences": [asdict(difference) for difference in each.differences],
        "nearest": nearest,
    }


if __name__ == "__main__":
    sys.exit(main())
