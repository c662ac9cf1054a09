"""`with bench.observe(model, group):` around every step of a training loop of one's own.

The first steps pay for what happens once, the next are timed with nothing else in them, a few more are
looked at from inside. Then the record is written, and the context does nothing any more.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench import words
from bench.config import ClusterConfig, ConfigError
from bench.environment import REPOSITORY
from bench.measure.memory import MemoryWatch
from bench.observation.feeding import Feeding
from bench.observation.outcome import (
    Setting,
    Wishes,
    failed_record,
    keep,
    observed_cell,
    observed_record,
    repeats,
    sharing,
)
from bench.observation.steps import OTHER_STEPS, Steps
from bench.observation.subject import subject_of
from bench.progress import outcome
from bench.rank_end import RankEnd
from bench.rank_failure import describe_failure
from bench.rank_log import RankLog
from bench.record import Record
from bench.sections import Report
from bench.store import Store


def observe(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    strategy: str = words.OWN,
    folder: str | Path = "results/observed",
    steps: int = 20,
    warmup_steps: int = 2,
    report: bool = True,
) -> Observation:
    """A context for every step of a loop that trains `model`; the same one, however often it is asked for.

    `group` are the ranks that share a sequence, None where none do. Every rank must enter it. After
    `warmup_steps` + `steps` + 6 steps rank 0 adds a record to `folder` and reports. `strategy` is the name
    it has there; with one of ours, the shapes and bytes that this strategy must show are checked, too. A
    step that raises leaves a record that says so. Without `report` there is only the record. Raises
    ConfigError for what cannot be observed.
    """
    known = Observation.of_models.get(model)
    if known is None:
        wishes = Wishes(
            strategy=strategy,
            folder=Path(folder),
            steps=steps,
            warmup_steps=warmup_steps,
            report=report,
        )
        known = Observation.of_models[model] = Observation(model, _process_group(group), wishes)
    return known


class Observation:
    """One model's steps, observed; `record` is there on rank 0 when it is over."""

    of_models: ClassVar[WeakKeyDictionary[nn.Module, Observation]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, wishes: Wishes) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "bench.observe: there is no process group; start the script with torchrun, even on one"
                " device, and call torch.distributed.init_process_group first"
            )
        self.wishes = wishes
        self.record: Record | None = None
        self._start = time.monotonic()
        subject, device, log = subject_of(model), _device(model), RankLog(lambda _: None)
        sharers = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        self._steps = Steps(
            subject, group, wishes, log, device, Feeding(subject.networks, sharers, log.step),
            MemoryWatch(device, log.step),
        )  # fmt: skip
        self._started_at = _agreed_time(device)
        self._boundaries = self._steps.boundaries()
        self._speaks = dist.get_rank() == 0
        self._seen = 0
        self._is_over = False
        atexit.register(self._say_what_is_missing)

    def __enter__(self) -> Self:
        if not self._is_over:
            next(self._boundaries)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if error is not None:
            self._is_over = True
            self._fail(error)
            return
        self._seen += 1
        if self._seen < self.wishes.warmup_steps + self.wishes.steps + OTHER_STEPS:
            next(self._boundaries)
            return
        self._is_over = True
        next(self._boundaries, None)
        self._finish()

    def _finish(self) -> None:
        """Bring the ranks' reports together, judge them and write the record, on rank 0."""
        reports = _gathered_on_rank_0(self._steps.report)
        if not reports:
            return
        setting, wall_s = self._setting(), time.monotonic() - self._start
        with Store(self.wishes.folder) as store:
            cell = observed_cell(setting, self.wishes, sharing(reports)[0])
            repeat = repeats(cell.cell_id, store)
            self.record = observed_record(setting, self.wishes, reports, wall_s, repeat)
            keep(self.record, store)
        print(f"bench.observe: {outcome(self.record)}", flush=True)
        if self.wishes.report:
            _report(self.wishes.folder)

    def _fail(self, error: BaseException) -> None:
        """Write what ended the loop, unless another rank has done so or nothing is known of the tokens."""
        self._boundaries.close()
        tokens, setting = self._steps.feeding.tokens, self._setting()
        if tokens is None or not isinstance(error, Exception):
            return
        failure = describe_failure(error, self._steps.log, setting.cluster)
        end = RankEnd(dist.get_rank(), None, None, failure, log_tail="")
        wall_s = time.monotonic() - self._start
        with suppress(ConfigError), Store(self.wishes.folder) as store:
            self.record = failed_record(setting, self.wishes, tokens, end, wall_s, repeat=0)
            keep(self.record, store)
            said = f"bench.observe: {outcome(self.record)}; record in {self.wishes.folder}"
            print(said, file=sys.stderr, flush=True)

    def _setting(self) -> Setting:
        subject, device = self._steps.subject, self._steps.device
        return Setting(
            model=subject.model_config(),
            engine=subject.engine,
            attention_name=subject.attention_name,
            dtype=self._steps.dtype,
            checkpointing=subject.checkpointing,
            cluster=ClusterConfig(
                name=words.OWN,
                world_size=dist.get_world_size(),
                device=device.type,
                backend=str(dist.get_backend()),
                ranks_per_gpu=1,
                threads_per_rank=torch.get_num_threads(),
                memory_limit_gib=None,
            ),
            started_at=self._started_at,
        )

    def _say_what_is_missing(self) -> None:
        needed = self.wishes.warmup_steps + self.wishes.steps + OTHER_STEPS
        if not self._is_over and self._speaks:
            print(
                f"bench.observe: saw {self._seen} of the {needed} steps that it needs, and wrote nothing; run"
                " longer, or observe fewer steps with steps=",
                file=sys.stderr,
            )


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks as a group; None where a rank shares its sequences with nobody."""
    found = group.get_group() if isinstance(group, DeviceMesh) else group
    return None if found is None or dist.get_world_size(found) == 1 else found


def _device(model: nn.Module) -> torch.device:
    """Where the model computes, which need not be where its parameters are kept."""
    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters()).device


def _agreed_time(device: torch.device) -> datetime:
    """Rank 0's clock: what makes records of the same loop known as such."""
    now = torch.tensor(datetime.now(UTC).timestamp(), dtype=torch.float64, device=device)
    dist.broadcast(now, src=0)
    return datetime.fromtimestamp(now.item(), UTC)


def _gathered_on_rank_0(report: Report) -> Sequence[Report]:
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(report, gathered)
    return gathered or []


def _report(folder: Path) -> None:
    """Tables, figures and page, by a process of their own: a training script need not import all that."""
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [sys.executable, "-m", "analysis.report", str(folder.absolute())], cwd=REPOSITORY, check=False
    )
