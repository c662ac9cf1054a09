"""From what the ranks of somebody's own loop report to a record. No torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.cell.ends import classify
from bench.cell.outcome import failed, judged, not_finite_on_a_rank, refused, with_software
from bench.cell.planned import PlannedCell
from bench.config import (
    OWN,
    ClusterConfig,
    ConfigError,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    RunConfig,
    WorkloadConfig,
)
from bench.environment import REPOSITORY, this_machine
from bench.node.end import RankEnd
from bench.observation.checks import checks_of_loop, forgotten_group
from bench.observation.objective import wrong_objective
from bench.observation.script import this_script
from bench.observation.tokens import LoopReport, RankTokens, layout_of, misfed, seq_len, stated_not_finite
from bench.passes import first_failure, merge, planned_stages
from bench.record import Record, Role
from bench.request import values
from bench.request.hardware import this_hardware
from bench.store import Store, read_records
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveRequest:
    """What the user asked for: the strategy's name in the report, where to, how many steps."""

    strategy: str
    folder: Path
    steps: int
    warmup_steps: int
    report: bool

    def __post_init__(self) -> None:
        values.whole("steps", self.steps)
        values.whole("warmup_steps", self.warmup_steps, least=0)
        facts = STRATEGIES.get(self.strategy)
        if facts is not None and facts.options:
            raise ConfigError(
                f"strategy={self.strategy}: has choices of its own ({', '.join(facts.options)}), which cannot"
                " be told from outside; take another name"
            )

    @property
    def measure(self) -> MeasureConfig:
        """How much of what is measured: only the number of steps limits it."""
        return MeasureConfig(
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            warmup_s=0.0,
            least_steps=0,
            budget_s=0.0,
            repeats=1,
            repeats_budget_s=0,
            reference_budget_s=0,
            timeout_s=0.0,
            trace=True,
            keep_traces=False,
            gradients=False,
        )

    @property
    def steps_needed(self) -> int:
        """The first step, the one whose attention is compared, and what the passes will ask for."""
        return 2 + sum(stage.steps for stage in planned_stages(self.measure, step_s=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What is known of the loop from outside, before anything was measured."""

    model: ModelConfig
    engine: str
    attention_name: str
    dtype: str
    checkpointing: bool
    cluster: ClusterConfig
    started_at: datetime


def observed_cell(loop: LoopFacts, request: ObserveRequest, sharers: Sequence[RankTokens]) -> RunConfig:
    """The loop as a cell; `sharers` are ranks of one sequence, what nobody can know is `own`."""
    first, sp_degree = sharers[0], len(sharers[0].group)
    facts = STRATEGIES.get(request.strategy)
    return RunConfig(
        seq_len=seq_len(first),
        batch=first.batch,
        grad_accum=first.micro_steps,
        strategy=request.strategy,
        options=(),
        layout=layout_of(sharers),
        kernel=loop.attention_name,
        dtype=loop.dtype,
        model=loop.model,
        engine=loop.engine,
        trainer=OWN,
        workload=WorkloadConfig(name="train", mask="causal"),
        data=DataConfig(name=OWN, path=None, tokenizer=None, prompt_tokens=0),
        mode="measure",
        hardware=this_hardware(this_machine(), loop.cluster.device),
        cluster=loop.cluster,
        sp_degree=sp_degree,
        ulysses_degree=facts.ulysses_degree(sp_degree, loop.model) if facts else 1,
        dp_replicate=1,
        dp_shard=loop.cluster.world_size // sp_degree,
        checkpointing=loop.checkpointing,
        loss=OWN,
        measure=request.measure,
        seed=0,
        env=(),
        experiment="none",
    )


def observed_record(
    loop: LoopFacts, request: ObserveRequest, reports: Sequence[LoopReport], wall_s: float, store: Store
) -> Record:
    """The record of a loop that ran to the end of its observation."""
    groups = sharing(reports)
    cell = observed_cell(loop, request, groups[0])
    repeat = repeats(cell.cell_id, store)
    planned = PlannedCell(cell, repeat, repeat, Role.OBSERVED)
    uneven = _uneven(reports)
    if uneven is not None:
        return refused(planned, uneven, wall_s, loop.started_at)
    sections = merge([each.report for each in reports], cell)
    misfeeding = next(filter(None, map(misfed, groups)), None)
    unchecked = None if misfeeding else _other_layers(reports)
    if unchecked is not None:
        return refused(planned, unchecked, wall_s, loop.started_at)
    objectives = [each.objective for each in reports]
    wrong = (
        forgotten_group(cell, sections)
        or misfeeding
        or stated_not_finite(reports)
        or first_failure(cell, sections)
        or not_finite_on_a_rank([each.report for each in reports])
        or wrong_objective(objectives, [[*group[0].group] for group in groups], cell.dtype)
    )
    made = checks_of_loop(cell, sections, groups, objectives)
    record = judged(planned, sections, made, wrong, wall_s, loop.started_at)
    return with_software(record, [each.report for each in reports])


def with_script(record: Record) -> Record:
    """The same record with whose script it was, in place of our own command line."""
    return replace(record, environment=record.environment | this_script())


def failed_record(
    loop: LoopFacts, request: ObserveRequest, tokens: RankTokens, end: RankEnd, wall_s: float, repeat: int
) -> Record:
    """The record of a loop that an error ended, as the rank knows it that met the error."""
    status, failure = classify([end])
    assert failure is not None
    cell = observed_cell(loop, request, [tokens])
    return failed(PlannedCell(cell, repeat, repeat, Role.OBSERVED), status, failure, wall_s, loop.started_at)


def keep(record: Record, store: Store) -> None:
    """Append the record, once: several ranks may meet the same error."""
    known = store.read()
    if not any(_is_same(record, other) for other in known):
        store.append(record)


def repeats(cell_id: str, store: Store) -> int:
    """How many records of this cell there are already."""
    return sum(record["cell_id"] == cell_id for record in store.read())


def sharing(reports: Sequence[LoopReport]) -> list[list[RankTokens]]:
    """What the ranks were fed, by the sequence that they share."""
    ranks = [each.tokens for each in reports]
    return [
        [ranks[member] for member in group] for group in dict.fromkeys(tuple(each.group) for each in ranks)
    ]


def _is_same(record: Record, other: Mapping[str, Any]) -> bool:
    return (record.cell_id, record.started_at) == (other["cell_id"], other["started_at"])


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
