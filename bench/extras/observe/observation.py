"""The context manager that `bench.observe` returns."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, ClassVar, Self, TextIO
from weakref import WeakKeyDictionary

import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from bench.common.labels import checks_label
from bench.config import Cell, ConfigError, ExitCode
from bench.extras.observe import loop_ranks, observed_record, sharding
from bench.extras.observe.attention_check import SequenceGroup
from bench.extras.observe.cell import ObserveRequest, observed_cell
from bench.extras.observe.loop import LoopAttention, LoopReplicas, ObservedLoop
from bench.extras.observe.observed_model import observed_model
from bench.extras.observe.step_watchdog import StepWatchdog
from bench.extras.observe.tokens import LoopReport
from bench.measure import decode_reports
from bench.measure.rank_pass import Measurement, StepRequest
from bench.plan.planned import PlannedCell
from bench.ranks.device import nccl_version
from bench.ranks.log import RankLog
from bench.record.record import Record, Role, Status
from bench.record.store import Store, StoreError
from bench.run.cell.ends import classify
from bench.run.cell.outcome import failure_record, outcome
from bench.run.node.failure import describe_failure
from bench.run.node.ranks import RankEnd, is_lost_peer_failure

LOST_PEER_WAIT_S = 1.0
"""Seconds in which a failed peer may store its record first; torchrun stops this rank soon afterwards."""
STORE_WAIT_S = 10.0
"""Longest wait for the records file, in seconds; ranks that raise the same error write one after another."""


class Observation:
    """Context manager for the steps of a training loop; `bench.observe` creates it.

    An error of the user's code in the context is stored in a record and raised again. An error of the
    observation is printed in one line, and the training continues unobserved.

    Attributes:
        record: The record, on rank 0 after the last observed step or on a rank that stored an error.
        is_over: Whether the context does nothing any more.
    """

    count: ClassVar[int] = 0
    """Number of observations in this process; equal on all ranks, so it identifies an observation."""
    active: ClassVar[Observation | None] = None
    """The observation whose context is entered."""
    by_model: ClassVar[WeakKeyDictionary[nn.Module, Observation]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, request: ObserveRequest) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "bench.observe: torch.distributed has no process group; start the script with torchrun, even"
                " on one device, and call torch.distributed.init_process_group before bench.observe"
            )
        self.request = request
        self.record: Record | None = None
        self._start = time.monotonic()
        self._log = RankLog(lambda _: None)
        self._steps = 0
        self._is_prepared = self.is_over = False
        self._is_rank_0 = dist.get_rank() == 0
        Observation.count += 1
        with self._contain_errors(refusals=(ConfigError, StoreError)):
            self._prepare(model, group)

    def _prepare(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        name = str(Observation.count)
        self._all_ranks = loop_ranks.AbortableBarrier(f"{name} all", range(dist.get_world_size()))
        self._sequence_ranks = loop_ranks.AbortableBarrier(f"{name} sequence", ranks)
        if self._is_rank_0:
            with Store(self.request.folder, STORE_WAIT_S, "bench.observe: folder") as store:
                store.read()  # errors must be raised before the training
        observed, device = observed_model(model), loop_ranks.device_of(model)
        sequence_group = SequenceGroup(ranks, group, device, self._sequence_ranks.wait)
        self._loop = ObservedLoop(observed, sequence_group, device, self._log.step)
        hooked = ("positions", "full_length") if self._loop.is_compiled else ()
        self._measurement = Measurement(
            self.request.measure,
            device,
            self._log,
            raise_if_rank_failed=self._all_ranks.wait,
            skipped=frozenset({"parity", *hooked}),
            replacements={"full_length": LoopAttention, "updates": LoopReplicas},
        )
        self._step_requests = self._measurement.steps(self._loop)
        self._all_ranks.wait()
        times = [datetime.now(UTC)]
        dist.broadcast_object_list(times, device=device)
        self._started_at = times[0]  # equal in all records of a run
        self._watchdog = StepWatchdog(name, self._log, device.type, self._store_hang)
        atexit.register(self._report_missing_steps)
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_rank_0 and is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._report_sigterm)
        self._is_prepared = True

    def __enter__(self) -> Self:
        if self.is_over:
            return self
        with self._contain_errors():
            if Observation.active is not None:
                raise ConfigError(
                    "the step of another model is being observed; observe one model at a time, such as the"
                    " teacher in a run of its own"
                )
            while next(self._step_requests) is StepRequest.BEFORE_NEXT_STEP:
                pass
            Observation.active = self
            self._watchdog.record_progress(is_in_step=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a step; after the last observed one, write the record and the report on rank 0."""
        if self.is_over:
            return
        Observation.active = None
        self._steps += 1
        if error is not None:
            self._stop(error, is_internal=False)
            return
        with self._contain_errors():
            self._watchdog.record_progress(is_in_step=False)
            if next(self._step_requests, None) is None:
                self._finish()
                self.is_over = True
                self._release_model()

    def loss(self, loss: Tensor | float | None = None, valid_tokens: Tensor | float | None = None) -> None:
        """State that the step trains the mean loss of next tokens over all ranks and micro-steps.

        Call it in every step, once per micro-step.

        Args:
            loss: The loss, whose gradient is checked; by default that of the model's `labels`.
            valid_tokens: Number of this rank's tokens in the loss; by default that of the model's labels.
        """
        if not self.is_over:
            self._loop.trained_tokens.state(loss, valid_tokens)

    @contextmanager
    def _contain_errors(self, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Stop the observation if its code raises; raise `refusals` and KeyboardInterrupt again."""
        try:
            yield
        except BaseException as error:
            is_internal = isinstance(error, Exception) and not isinstance(error, refusals)
            self._stop(error if is_internal else None, is_internal=True)
            if not is_internal:
                raise

    def _stop(self, error: BaseException | None, *, is_internal: bool) -> None:
        """Release the waiting ranks, and store the error of the observation or of the user's step, if any."""
        self.is_over = True
        failure = error if isinstance(error, Exception) else None
        with suppress(Exception):
            self._all_ranks.abort()
            self._sequence_ranks.abort()
            if failure is not None:
                self._all_ranks.announce_end()
        messages = []
        if is_internal and failure is not None:
            messages.append(f"the observation stopped, the training continues; reason: {one_line(failure)}")
        try:
            if self._is_prepared:
                self._step_requests.close()
                if failure is not None and not isinstance(failure, loop_ranks.PeerStoppedError):
                    self._store_failure(failure, is_internal=is_internal)
        except Exception as store_error:  # noqa: BLE001  it would end the training, or replace the user's error
            messages.append(f"no record was written; reason: {one_line(store_error)}")
        if messages and self.record is None:
            print_message("; ".join(messages))
        self._release_model()

    def _release_model(self) -> None:
        """Drop all references to the model; the user may still hold this observation."""
        atexit.unregister(self._report_missing_steps)
        if signal.getsignal(signal.SIGTERM) == self._report_sigterm:
            with suppress(ValueError):  # in another thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        attributes = vars(self)
        if "_watchdog" in attributes:
            self._watchdog.stop_event.set()
        if "_measurement" in attributes:
            self._measurement.passes.clear()  # passes refer to the measurement, which refers to the model
        for name in ("_loop", "_measurement", "_step_requests"):
            attributes.pop(name, None)

    def _finish(self) -> None:
        """Gather the reports of all ranks; on rank 0, judge them and write the record and the report."""
        local = self._loop_report()
        self._all_ranks.wait()
        reports: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(local, reports if self._is_rank_0 else None)
        if not self._is_rank_0:
            return
        shards, groups = sharding.sequence_groups(reports)[0], len(sharding.token_holders(reports))
        cell = observed_cell(self._loop, self.request, shards, groups)
        wall_s = time.monotonic() - self._start
        with Store(self.request.folder, STORE_WAIT_S) as store:
            repeat = sum(record.cell_id == cell.cell_id for record in store.read())
            record = observed_record.observed_record(cell, reports, repeat, wall_s, self._started_at)
            self.record = record = observed_record.store_once(record, store)
        result = outcome(record)
        if record.status is Status.OK:
            reasons = {check.what: check.reason for check in record.checks or ()}
            result = f"ok: {result}; {checks_label(reasons)}"
        for line in filter(None, (result, sharding.equal_tokens_line(reports))):
            print_message(line, sys.stdout)
        if self.request.report:
            try:
                observed_record.write_report(self.request.folder)
            except OSError as error:
                print_message(f"the record was written, but no report; reason: {one_line(error)}")

    def _loop_report(self) -> LoopReport:
        """Return this rank's report: its part of every section, and what only observed loops have."""
        loop, software = self._loop, nccl_version(self._measurement.device)
        calls = self._measurement.tap.calls
        values = {**self._measurement.report(), "phases_s": self._log.phases_s, "software": software}
        return LoopReport(
            rank_report=decode_reports([values])[0],
            tokens=loop.tokens,
            untimed_steps=loop.untimed_steps,
            attention_peers={rank for call in calls if call.purpose == "attention" for rank in call.members},
            objective=loop.objective,
        )

    @loop_ranks.delay_sigterm()
    def _store_failure(self, error: Exception, *, is_internal: bool) -> None:
        """Store a record of the error that ended the loop or its observation, if the tokens are known."""
        tokens = self._loop.input_watch.tokens
        if tokens is None:
            return
        cell = observed_cell(self._loop, self.request, [tokens])
        failure = describe_failure(error, self._log, cell.cluster)
        place = (
            "bench.observe, not in the training loop" if is_internal else observed_record.user_frame(error)
        )
        if is_lost_peer_failure(failure):
            # A peer has ended. If it can still store its own error, that record is the one that counts.
            time.sleep(LOST_PEER_WAIT_S)
            with suppress(Exception):  # the store may have ended, too
                silent = sharding.ranks_label(self._all_ranks.silent_ranks())
                if silent:
                    place += f"; no answer from rank {silent}, which ended or was killed"
        end = RankEnd(dist.get_rank(), ExitCode.FAILED, None, failure, log_tail="")
        self._store_end(cell, end, f" (in {place})")

    def _store_hang(self, end: RankEnd) -> None:
        """Store a record of a step that hangs, from the watchdog's thread."""
        print_message(f"rank {end.rank}: {end.hang}")
        watch = self._loop.input_watch
        tokens = watch.tokens or watch.read(reads_values=False)  # the first step may hang
        if tokens is not None:
            self._store_end(observed_cell(self._loop, self.request, [tokens]), end)

    def _store_end(self, cell: Cell, end: RankEnd, place: str = "") -> None:
        """Store the record of a loop that has ended or hangs, and print it."""
        wall_s = time.monotonic() - self._start
        status, failure = classify([end])
        assert failure is not None
        planned = PlannedCell(cell, 0, 0, Role.OBSERVED)
        record = failure_record(planned, status, failure, wall_s, self._started_at)
        with Store(self.request.folder, STORE_WAIT_S) as store:
            self.record = observed_record.store_once(replace(record, reason=f"{record.reason}{place}"), store)
        print_message(f"{outcome(self.record)}; record in {self.request.folder}")

    def _report_sigterm(self, *_: Any) -> None:
        self._report_missing_steps("SIGTERM: ", advice="")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    def _report_missing_steps(
        self, cause: str = "", advice: str = "; train longer, or pass fewer steps="
    ) -> None:
        """Print, when the script ends, that it ran too few steps for a record."""
        if not self.is_over and self._is_rank_0 and self.record is None:
            print_message(
                f"{cause}{self.request.steps_needed} steps are needed, but only {self._steps} were observed,"
                f" so no record was written{advice}"
            )


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print one line, to stderr by default. A closed stream is ignored, so that the training continues."""
    with suppress(Exception):
        print(f"bench.observe: {text}", file=stream or sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """Return type and first line of an error, such as `KeyError: 'scatter'`; no type for a ConfigError."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ConfigError) else f"{type(error).__name__}: {first}".removesuffix(": ")
