"""Which strategy, before anything runs: `python -m analysis.advise model=qwen3_8b seq_len=128k ...`.

Takes the words of run_sweep.py. A list such as seq_len=64k,128k asks one question for each value; lists of
strategy, layout, sp_degree, ulysses_degree and dp_shard limit what is compared.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from analysis.advice.answer import answer, rival_of, setting, title
from analysis.advice.changes import first_that_fits, what_would_change
from analysis.advice.maps import (
    LINKS,
    MAP_LENGTHS,
    MAP_STRATEGIES,
    Leader,
    leader,
    one_of_each_degree,
    reaches,
    with_link,
)
from analysis.advice.option import Option, forecast
from analysis.advice.ranking import Ranking, ranked
from analysis.advice.table import lines_below, table_of
from bench.command import sweep_command, tool_words
from bench.config import ConfigError, ExitCode, RunConfig
from bench.cost.fit import Fit
from bench.cost.hardware import Hardware
from bench.cost.prediction import predict
from bench.environment import this_machine
from bench.request import values
from bench.request.hardware import PRICE, hardware_of, usable_bytes
from bench.request.hydra_errors import translated
from bench.request.legality import refusal
from bench.request.placement import MAX_CPU_RANKS
from bench.request.questions import Question, questions, spread
from bench.statistics import MIN_PROCESSES
from bench.store import StoreError
from bench.strategies import STRATEGIES

TABLE_COLUMNS = 200
"""More than a table takes: a terminal that is narrower wraps its lines."""
LINE_COLUMNS = 125
NO_BREAK = "\u00a0"
SWEEPS = Path("results/sweeps")
MOST_RANKS = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog=tool_words("analysis.advise"), description=__doc__)
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for run_sweep.py")
    parser.add_argument(
        "--records", nargs="*", type=Path, metavar="FOLDER",
        help="sweeps whose measured records stand in place of predictions (default: those in results/sweeps)",
    )  # fmt: skip
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="where to draw the map and the reach")
    parser.add_argument("--all", action="store_true", help="every option, not the best of each strategy")
    chosen, unknown = parser.parse_known_args(arguments)
    try:
        for number, question in enumerate(questions([*unknown, *chosen.words])):
            advice = Advice(question, chosen.records)
            lines = advice.lines(whole=chosen.all)
            print(*([""] if number else []), *lines, sep="\n")
            if chosen.figures is not None:
                print(*advice.figures(chosen.figures), sep="\n")
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    except (HydraException, OmegaConfBaseException) as error:
        print(translated(error), file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    return ExitCode.OK


@dataclass(frozen=True)
class Advice:
    """One question, and all that its answer is made of; raises ConfigError for a request that is no good."""

    question: Question
    records: Sequence[Path] | None = None
    """Sweeps' folders; None for those in SWEEPS that say anything of this hardware."""

    @cached_property
    def cells(self) -> list[RunConfig]:
        """Every way to do the work."""
        return spread(self.question.raw, self.question.given, this_machine())

    @cached_property
    def hardware(self) -> Hardware:
        """The device that all options run on."""
        return hardware_of(self.cells[0].hardware)

    @cached_property
    def price(self) -> float | None:
        """Of a device and hour; None until the user gives one."""
        price = self.question.raw["hardware"].get(PRICE)
        return None if price is None else values.positive(f"hardware.{PRICE}", price, example="2.5")

    @cached_property
    def ranking(self) -> Ranking:
        """Raises ConfigError where nothing can run, for one reason."""
        options = [self.forecast(cell) for cell in self.cells]
        shared = _in_all([option.refused for option in options])
        if shared:
            raise ConfigError(shared)
        return ranked(self._with_records(options))

    def _with_records(self, options: list[Option]) -> list[Option]:
        folders = _sweeps_about(self.cells[0].hardware) if self.records is None else self.records
        if not folders:
            return options
        from analysis.advice.records import with_records  # pandas

        return with_records(options, folders)

    def forecast(self, cell: RunConfig) -> Option:
        """One way as arithmetic sees it; refused where a plugin's facts fail."""
        try:
            with STRATEGIES.plugin_errors_named(cell.strategy):
                return forecast(cell, refusal(cell), self.hardware, self._usable(cell))
        except ConfigError as error:
            return Option(cell=cell, refused=str(error))

    def lines(self, *, whole: bool) -> list[str]:
        """Question, table and answer; of all options where it is to be `whole`."""
        ranking = self.ranking
        table = _table_lines(table_of(ranking, self.price, whole=whole)) if ranking.able else []
        below = lines_below(ranking, whole=whole)
        sentences = [*below, *answer(ranking), *self._changes()]
        wrapped = [line for each in sentences for line in _wrapped(each)]
        return [title(self.cells[0]), *table, *wrapped, *self._to_measure()]

    def figures(self, folder: Path) -> list[str]:
        """Draw who leads at which length and link, and how long a sequence fits; the names of the files."""
        from analysis.advice.figures import write_map, write_reach  # matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        subtitle = f"{self.cells[0].model.name}, {setting(self.cells[0])}"
        write_map([*self._leaders()], subtitle, folder)
        cells = [
            cell for cell in one_of_each_degree(self._at(self.cells[0].seq_len)) if refusal(cell) is None
        ]
        write_reach(reaches(cells, self._fit), self.cells[0].seq_len, subtitle, folder)
        return [f"figures: {folder / 'crossover.png'}, {folder / 'longest.png'}"]

    def _leaders(self) -> Iterator[Leader]:
        for length in MAP_LENGTHS:
            cells = [(cell, refusal(cell)) for cell in self._at(length)]
            for rate, _ in LINKS:
                hardware = with_link(self.hardware, rate)
                options = (forecast(cell, refused, hardware, self._usable(cell)) for cell, refused in cells)
                yield leader(length, rate, options)

    def _at(self, seq_len: int) -> list[RunConfig]:
        """The ways to do the work at another length, of one implementation each unless others are named."""
        given = {"strategy": MAP_STRATEGIES, **self.question.given}
        return spread({**self.question.raw, "seq_len": seq_len}, given, this_machine())

    def _usable(self, cell: RunConfig) -> int | None:
        return usable_bytes(cell, this_machine())

    def _fit(self, cell: RunConfig) -> Fit | None:
        prediction = predict(cell, self.hardware, self._usable(cell))
        return None if prediction is None else prediction.fit

    def _changes(self) -> list[str]:
        option = self.ranking.first or next(iter(self.ranking.too_large), None)
        if option is None:
            return []
        told = what_would_change(option, self.hardware.attention_forward, self.forecast)
        if option.may_lack_memory:
            more = first_that_fits(self._more_ranks(), self._best_on)
            told += [] if more is None else [more]
        return [f"What would change it: {'; '.join(told)}."] if told else []

    def _more_ranks(self) -> Iterator[int]:
        size = 2 * self.cells[0].cluster.world_size
        while size <= (MOST_RANKS if self.cells[0].cluster.device == "cuda" else MAX_CPU_RANKS):
            yield size
            size *= 2

    def _best_on(self, ranks: int) -> Option | None:
        raw = self.question.raw
        larger = {**raw, "cluster": {**raw["cluster"], "world_size": ranks}}
        return Advice(replace(self.question, raw=larger)).ranking.first

    def _to_measure(self) -> list[str]:
        """The command that measures the first beside the best of another strategy."""
        first = self.ranking.first
        if first is None:
            return []
        rival = rival_of(self.ranking, first)
        cells = [each.cell for each in (first, rival) if each is not None]
        by_degrees: dict[tuple[str, ...], list[str]] = {}
        for cell in cells:
            by_degrees.setdefault(_degree_words(cell), []).append(cell.strategy)
        return [f"To measure it: {self._sweep(*each)}" for each in by_degrees.items()]

    def _sweep(self, degrees: Sequence[str], strategies: Sequence[str]) -> str:
        """The command that runs these strategies on the machine itself, often enough to tell them apart."""
        asked = (word for word in self.question.words if not word.startswith("hardware"))
        choice = f"strategy={','.join(strategies)}"
        words = [*asked, choice, *degrees, f"measure.repeats={MIN_PROCESSES}"]
        return shlex.join([*sweep_command(), "-m", *words])


def _degree_words(cell: RunConfig) -> tuple[str, ...]:
    """What spreads a cell as it is."""
    words = {"sp_degree": cell.sp_degree, "dp_shard": cell.dp_shard}
    if STRATEGIES[cell.strategy].is_hybrid:
        words["ulysses_degree"] = cell.ulysses_degree
    return tuple(f"{key}={degree}" for key, degree in words.items() if degree > 1)


def _wrapped(sentence: str) -> list[str]:
    """Lines of LINE_COLUMNS, no number apart from its unit."""
    lines = textwrap.wrap(re.sub(r" (?=%|GiB)", NO_BREAK, sentence), LINE_COLUMNS, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]


def _sweeps_about(hardware: str) -> list[Path]:
    """The folders of SWEEPS whose records name this hardware."""
    named = f'"hardware":"{hardware}"'.encode()
    return [path.parent for path in sorted(SWEEPS.glob("*/records.jsonl")) if named in path.read_bytes()]


def _table_lines(table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=TABLE_COLUMNS, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _in_all(reasons: Sequence[str | None]) -> str:
    """What all of them say; nothing where one way is possible."""
    parts = [() if reason is None else reason.split("; ") for reason in reasons]
    return "; ".join(part for part in (parts[0] if parts else ()) if all(part in each for each in parts))


if __name__ == "__main__":
    sys.exit(main())
