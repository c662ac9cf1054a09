"""One model's steps: what begins and ends them, and what is written when they are over.

The first steps pay for what happens once, the next are timed with nothing else in them, a few more are
looked at from inside. Then the record is written, and the context does nothing any more.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from bench.cell.ends import RankEnd, lost_a_peer
from bench.cell.failure import describe_failure
from bench.cell.outcome import outcome
from bench.config import OWN, ClusterConfig, ConfigError, ExitCode
from bench.observation.fed_tokens import FedTokens
from bench.observation.loop import Loop, LoopParity
from bench.observation.loop_ranks import agreed_time, device_of, gathered_on_rank_0, sigterm_held_back
from bench.observation.observed_model import observed_model
from bench.observation.outcome import (
    LoopFacts,
    ObserveRequest,
    check_records,
    failed_record,
    keep,
    observed_record,
    report,
)
from bench.observation.tokens import LoopReport
from bench.passes.facts import RankReport
from bench.passes.rank_pass import Ask, Measurement
from bench.ranks.log import RankLog
from bench.record import Record
from bench.store import Store

LOST_PEER_WAIT_S = 1.0
"""How long the record of a peer that left may still come; whoever started the ranks ends the others soon."""


class Observation:
    """One model's steps, observed; `record` is there on rank 0 when it is over."""

    inside: ClassVar[Observation | None] = None
    of_models: ClassVar[WeakKeyDictionary[nn.Module, Observation]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, request: ObserveRequest) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "bench.observe: there is no process group; start the script with torchrun, even on one"
                " device, and call torch.distributed.init_process_group first"
            )
        if dist.get_rank() == 0:
            check_records(request.folder)
        self.request = request
        self.record: Record | None = None
        self._start = time.monotonic()
        observed, device, self._log = observed_model(model), device_of(model), RankLog(lambda _: None)
        sharers = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        fed = FedTokens(observed.called, sharers, self._log.step)
        self._loop = Loop(observed, group, device, fed, self._log.step)
        self._measurement = Measurement(request.measure, device, self._log, instead={"parity": LoopParity})
        self._asks = self._measurement.steps(self._loop)
        self._model = observed.model_config()
        self._started_at = agreed_time(device)
        self._speaks = dist.get_rank() == 0
        self._seen = 0
        self._is_over = False
        atexit.register(self._say_what_is_missing)

    def __enter__(self) -> Self:
        if self._is_over:
            return self
        if Observation.inside is not None:
            raise ConfigError(
                "bench.observe: another step is being observed; observe one model at a time, such as the"
                " teacher in a run of its own"
            )
        with self._own_work():
            while next(self._asks) is Ask.BETWEEN:
                pass
        Observation.inside = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        Observation.inside = None
        self._seen += 1
        with self._own_work():
            if error is not None:
                self._is_over = True
                self._fail(error)
            elif next(self._asks, None) is None:
                self._finish()
                self._is_over = True

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Around what is not the user's: an error in it may be one rank's alone, whose peers only lose it."""
        try:
            yield
        except BaseException as error:
            if not self._is_over:
                self._is_over = True
                self._fail(error)
            raise
        finally:
            if self._is_over:
                self._let_go()

    def _let_go(self) -> None:
        """Hold the model no longer: the table by models, and the interpreter's end, hold this."""
        atexit.unregister(self._say_what_is_missing)
        self._measurement.passes.clear()  # each holds the measurement, which holds the model
        del self._loop, self._measurement, self._asks

    def _finish(self) -> None:
        """Bring the ranks' reports together, judge them and write the record, on rank 0."""
        reports = gathered_on_rank_0(self._report())
        if not reports:
            return
        loop, wall_s = self._facts(), time.monotonic() - self._start
        try:
            with Store(self.request.folder) as store:
                self.record = observed_record(loop, self.request, reports, wall_s, store)
                keep(self.record, store)
        except (ValueError, OSError) as error:  # a full disk must not end somebody's training
            print(f"bench.observe: no record: {error}", file=sys.stderr, flush=True)
            return
        self._is_over = True
        with suppress(OSError):  # nor does a closed terminal; the record is kept
            print(f"bench.observe: {outcome(self.record)}", flush=True)
            if self.request.report:
                report(self.request.folder)

    @sigterm_held_back()
    def _fail(self, error: BaseException) -> None:
        """Write what ended the loop, unless another rank has done so or nothing is known of the tokens."""
        self._asks.close()
        tokens, loop = self._loop.fed.tokens, self._facts()
        if tokens is None or not isinstance(error, Exception):
            return
        failure = describe_failure(error, self._log, loop.cluster)
        if lost_a_peer(failure):
            # A peer is gone; if it can still say why, its record is the one that counts.
            time.sleep(LOST_PEER_WAIT_S)
        end = RankEnd(dist.get_rank(), ExitCode.FAILED, None, failure, log_tail="")
        wall_s = time.monotonic() - self._start
        with suppress(ValueError, OSError), Store(self.request.folder) as store:
            self.record = failed_record(loop, self.request, tokens, end, wall_s, repeat=0)
            keep(self.record, store)
            said = f"bench.observe: {outcome(self.record)}; record in {self.request.folder}"
            print(said, file=sys.stderr, flush=True)

    def _report(self) -> LoopReport:
        report = RankReport(self._measurement.parts(), self._log.phases_s)
        return LoopReport(report, self._loop.tokens, self._loop.sizes)

    def _facts(self) -> LoopFacts:
        model, device = self._loop.model, self._loop.device
        return LoopFacts(
            model=self._model,
            engine=model.engine,
            attention_name=model.attention_name,
            dtype=self._loop.dtype,
            checkpointing=model.checkpointing,
            cluster=ClusterConfig(
                name=OWN,
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
        if not self._is_over and self._speaks:
            print(
                f"bench.observe: saw {self._seen} of the {self.request.steps_needed} steps that it needs, and"
                " wrote nothing; run longer, or observe fewer steps with steps=",
                file=sys.stderr,
            )
