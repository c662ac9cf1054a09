"""Time the training steps of one rank under an engine, to see what its Python costs a layer.

    python results/reference/half_hour/host_engines.py ENGINE OUT.jsonl [WORD ...]

Builds the cell of these words as the harness does and takes steps for some seconds, without passes, gates or
a second process: run it under py-spy for a profile of the host. Appends one JSON line. `issued_ms` is the
time until a step's call returned; a device that is the bottleneck works on after it. Engines start from equal
weights, so their losses and gradient norms show whether an option changes results.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.environment import this_machine
from bench.config import Cell
from bench.measure.timing.clock import synchronise
from bench.measure.workloads.train import TrainWorkload
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.groups import make_groups
from bench.ranks.log import StepPhase
from bench.ranks.products import use_wide_products
from bench.request.composition import compose_words
from bench.request.resolve import resolve
from bench.run.node.job import RankJob
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import InputDigest
from bench.training.engines.ddp.engine import DDP
from bench.training.trainers.trainer import StepOutcome

ENGINES = {
    "zero3": ("engine=zero3",),
    "zero3_leaf": ("engine=zero3", "engine.leaf=layer"),
    "fsdp2": ("engine=fsdp2",),
    "ddp": ("engine=ddp",),
    "plain": ("engine=ddp",),
}
"""Words of each case. `plain` is the loop that a user writes by hand: torch, autocast and AdamW alone."""
WORDS = ("strategy=local", "cluster.world_size=1")
FIRST_STEPS, LEAST_STEPS, SECONDS = 5, 3, 5.0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Milliseconds of one step, and its results where the harness's loop ran."""

    issued_ms: float
    whole_ms: float
    loss_and_norm: tuple[float, float] | None


class UnseenTokens(InputDigest):
    """Record of tokens that stays empty, as a plain step has none."""

    def add(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
        pass


def main() -> None:
    """Measure the case that the command line names; leave as a rank does, without Python's shutdown."""
    name, output, *words = sys.argv[1:]
    words = [*WORDS, *ENGINES[name], *words]
    steps = measured(resolve(compose_words(*words), this_machine()), is_plain=name == "plain")
    first, later = steps[:FIRST_STEPS], steps[FIRST_STEPS:]
    line = {
        "case": name,
        "words": words,
        "first_ms": [each.whole_ms for each in first],
        "n": len(later),
        "median_ms": statistics.median(each.whole_ms for each in later),
        "issued_ms": statistics.median(each.issued_ms for each in later),
        "losses_and_norms": [each.loss_and_norm for each in first],
    }
    with Path(output).open("a") as file:
        print(json.dumps(line), file=file)
    print(json.dumps(line), flush=True)
    os._exit(0)


def measured(cell: Cell, *, is_plain: bool) -> list[TimedStep]:
    """Build the cell on one rank and take steps, FIRST_STEPS and then for SECONDS."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(cell.cluster.threads_per_rank)
    products = use_wide_products() if cell.cluster.device == "cpu" else None
    folder = Path(tempfile.mkdtemp())
    device = join(RankJob(cell, 0, folder, scratch=None, rendezvous=folder / "store"))
    strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
    with strategy.install() as wiring:
        workload = TrainWorkload(WorkloadRank(strategy, wiring, device, StepPhase()))
        step = partial(plain_step, workload) if is_plain else workload.step
        steps = [timed(step, number, device) for number in range(FIRST_STEPS)]
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s or len(steps) < FIRST_STEPS + LEAST_STEPS:
            steps.append(timed(step, len(steps), device))
    shutil.rmtree(folder)  # not before: later groups meet in its store, too
    del products  # torch's own return with it
    return steps


def plain_step(workload: TrainWorkload, number: int) -> None:
    """Take the step that a user writes by hand, with the model, strategy and data of the harness."""
    rank, cell, engine = workload.rank, workload.cell, workload.optimizer
    assert isinstance(engine, DDP)
    engine.model.input_digest = UnseenTokens()
    groups = rank.strategy.groups
    batch = rank.strategy.shard(
        workload.trainer.data.micro_batch(number, 0, groups.data_rank, cell.padded_len)
    )
    valid = (batch.labels != IGNORED_LABEL).sum()
    dist.all_reduce(valid)
    with engine.autocast:
        loss_sum = engine.module(batch.input_ids, batch.labels, batch.position_ids)
        (loss_sum * (groups.world_size / valid)).backward()
    torch.nn.utils.clip_grad_norm_(engine.model.parameters(), cell.optimizer.max_grad_norm)
    engine.updater.optimizer.step()
    engine.updater.schedule.step()
    engine.updater.optimizer.zero_grad()


def timed(step: Callable[[int], StepOutcome | None], number: int, device: torch.device) -> TimedStep:
    """Take a step, and wait for the device before the clock stops."""
    start_s = time.perf_counter()
    outcome = step(number)
    issued_ms = (time.perf_counter() - start_s) * 1e3
    synchronise(device)
    whole_ms, result = (time.perf_counter() - start_s) * 1e3, None
    if isinstance(outcome, StepOutcome):
        result = float(outcome.loss_sum / outcome.valid_tokens), float(outcome.grad_norm)
    return TimedStep(issued_ms, whole_ms, result)


if __name__ == "__main__":
    main()
