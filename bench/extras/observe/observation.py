"""The context manager that `bench.observe` returns.

The first steps include costs that occur once, the next steps are timed without instruments, and a few more
are inspected (with hooks) or traced (with torch.profiler). Then the record is written, and from then on the
context does nothing. After an error of the observation itself, which is printed in one line, it does nothing
either, and the training continues.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, ClassVar, Self, TextIO
from weakref import WeakKeyDictionary

import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from bench.common.labels import checks_label
from bench.config import Cell, ConfigError, ExitCode
from bench.extras.observe.cell import ObserveRequest, observed_cell
from bench.extras.observe.loop import LoopFullLength, LoopParity, LoopReplicas, ObservedLoop
from bench.extras.observe.loop_ranks import (
    AbortableBarrier,
    PeerStoppedError,
    broadcast_time,
    delay_sigterm,
    device_of,
)
from bench.extras.observe.observed_model import observed_model, refuse_compiled
from bench.extras.observe.observed_record import (
    check_folder,
    failed_record,
    observed_record,
    sequence_groups,
    store_once,
    user_frame,
    write_report,
)
from bench.extras.observe.parity import SequenceGroup
from bench.extras.observe.step_watchdog import StepWatchdog
from bench.extras.observe.tokens import LoopReport
from bench.measure import decode_reports
from bench.measure.rank_pass import Measurement, StepRequest
from bench.ranks.device import nccl_version
from bench.ranks.log import RankLog
from bench.record.record import Record, Status
from bench.record.store import Store, StoreError
from bench.run.cell.outcome import outcome
from bench.run.node.failure import describe_failure
from bench.run.node.ranks import RankEnd, is_lost_peer_failure

LOST_PEER_WAIT_S = 1.0
"""Seconds in which a failed peer may store its record first; torchrun stops this rank soon afterwards."""
STORE_WAIT_S = 10.0
"""Longest wait for the records file, in seconds; ranks that raise the same error write one after another."""


class Observation:
    """Context manager for the steps of a training loop; `bench.observe` creates it.

    An error of the user's code in the context is stored in a record and raised again. An error of the
    observation is printed, and the training continues unobserved.

    Attributes:
        record: The record, on rank 0 after the last observed step or on a rank that stored an error; else
            None.
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
        self._is_prepared = self._is_over = False
        Observation.count += 1
        with self._contain_errors(refusals=(ConfigError, StoreError)):
            self._prepare(model, group)

    def _prepare(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Set up everything before the first step; raise ConfigError if the loop cannot be observed."""
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        self._all_ranks = AbortableBarrier(f"{Observation.count} all", range(dist.get_world_size()))
        self._sequence_ranks = AbortableBarrier(f"{Observation.count} sequence", ranks)
        sequence_group = SequenceGroup(ranks, group, self._sequence_ranks.wait)
        if dist.get_rank() == 0:
            check_folder(self.request.folder)
        observed, device = observed_model(model), device_of(model)
        self._model = observed.model_config()
        self._loop = ObservedLoop(observed, sequence_group, device, self._log.step)
        self._measurement = Measurement(
            self.request.measure,
            device,
            self._log,
            raise_if_rank_failed=self._all_ranks.wait,
            replacements={"parity": LoopParity, "full_length": LoopFullLength, "updates": LoopReplicas},
        )
        self._step_requests = self._measurement.steps(self._loop)
        self._all_ranks.wait()
        self._started_at = broadcast_time(device)
        self._is_rank_0 = dist.get_rank() == 0
        self._watchdog = StepWatchdog(f"{Observation.count}", self._log, device.type, self._store_hang)
        atexit.register(self._report_missing_steps)
        self._is_prepared = True

    def __enter__(self) -> Self:
        """Begin a step; does nothing once the observation is over."""
        if self._is_over:
            return self
        with self._contain_errors():
            if Observation.active is not None:
                raise ConfigError(
                    "the step of another model is being observed; observe one model at a time, such as the"
                    " teacher in a run of its own"
                )
            if self._steps == 0:
                refuse_compiled(self._loop.model.entry_points[0])
            while next(self._step_requests) is StepRequest.BEFORE_NEXT_STEP:
                pass
            Observation.active = self
            self._watchdog.record_progress(is_in_step=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a step; after the last observed one, write the record and the report on rank 0."""
        if self._is_over:
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
                self._is_over = True

    def loss(self, loss: Tensor | float | None = None, valid_tokens: Tensor | float | None = None) -> None:
        """State the loss of a step, so that the training objective is checked.

        A loop that calls this says that it trains the mean cross-entropy of next tokens, over the valid
        tokens of all ranks and micro-steps. Call it in every step, once per micro-step. Tensors are copied
        without a synchronization.

        Args:
            loss: The value on which `backward` is called, before a gradient scaler multiplies it, or the mean
                itself. Without it only labels, weights and gradients are compared.
            valid_tokens: Number of this rank's tokens in the loss. By default, it is the number of labels
                passed to the model, without ignored labels; if it got none, the number of tokens with a
                gradient.
        """
        if not self._is_over:
            self._loop.trained_tokens.state(self._steps, loss, valid_tokens)

    @contextmanager
    def _contain_errors(self, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Stop the observation instead of the training if the observation's code raises.

        Only `refusals` and exceptions such as KeyboardInterrupt are raised again.
        """
        try:
            yield
        except BaseException as error:
            is_internal = isinstance(error, Exception) and not isinstance(error, refusals)
            self._stop(error if is_internal else None, is_internal=True)
            if not is_internal:
                raise
        else:
            if self._is_over:
                self._release_model()

    def _stop(self, error: BaseException | None, *, is_internal: bool) -> None:
        """Stop the observation: release the waiting ranks, and store the error in a record if possible.

        `is_internal` says that the observation's code raised the error, and not the user's step. `error` is
        None if the code refused to observe or was interrupted. This method raises nothing, because an error
        of the user's step must propagate.
        """
        self._is_over = True
        with suppress(Exception):
            self._all_ranks.abort()
            self._sequence_ranks.abort()
        messages = []
        if is_internal and isinstance(error, Exception):
            messages.append(f"the observation stopped, the training continues; reason: {one_line(error)}")
        try:
            if self._is_prepared:
                self._step_requests.close()
                if isinstance(error, Exception) and not isinstance(error, PeerStoppedError):
                    self._store_failure(error, is_internal=is_internal)
        except Exception as store_error:  # noqa: BLE001  it would end the training, or replace the user's error
            messages.append(f"no record was written; reason: {one_line(store_error)}")
        if messages and self.record is None:
            print_message("; ".join(messages))
        self._release_model()

    def _release_model(self) -> None:
        """Drop all references to the model; the user may still hold this observation."""
        atexit.unregister(self._report_missing_steps)
        attributes = vars(self)
        if "_watchdog" in attributes:
            self._watchdog.stop()
        if "_measurement" in attributes:
            self._measurement.passes.clear()  # passes refer to the measurement, which refers to the model
        for name in ("_loop", "_measurement", "_step_requests"):
            attributes.pop(name, None)

    def _finish(self) -> None:
        """Gather the reports of all ranks; on rank 0, judge them and write the record and the report."""
        local = self._loop_report()
        self._all_ranks.wait()
        gathered: list[Any] | None = [None] * dist.get_world_size() if self._is_rank_0 else None
        dist.gather_object(local, gathered)
        if gathered is None:
            return
        reports: list[LoopReport] = gathered
        groups, wall_s = sequence_groups(reports), time.monotonic() - self._start
        cell = observed_cell(self._loop, self._model, self.request, groups[0])
        with Store(self.request.folder, STORE_WAIT_S) as store:
            repeat = sum(record.cell_id == cell.cell_id for record in store.read())
            record = observed_record(cell, reports, groups, repeat, wall_s, self._started_at)
            self.record = record = store_once(record, store)
        reasons = {check.what: check.reason for check in record.checks or ()}
        is_ok = record.status is Status.OK
        objective = "" if reasons.get("objective") is None else " (objective not checked)"
        print_message(f"ok{objective}: {outcome(record)}" if is_ok else outcome(record), sys.stdout)
        if is_ok:
            print_message(checks_label(reasons), sys.stdout)
        if self.request.report:
            try:
                write_report(self.request.folder)
            except Exception as error:  # noqa: BLE001  the record is stored, and the training must continue
                print_message(f"the record was written, but no report; reason: {one_line(error)}")

    def _loop_report(self) -> LoopReport:
        """Return this rank's report: its part of every section, and what only observed loops have."""
        loop, software = self._loop, nccl_version(self._measurement.device)
        values = {**self._measurement.report(), "phases_s": self._log.phases_s, "software": software}
        (rank_report,) = decode_reports([values])
        return LoopReport(
            rank_report=rank_report,
            tokens=loop.tokens,
            step_sizes=loop.step_sizes,
            unplain_layers=loop.unplain_layers,
            objective=loop.objective,
            stated_not_finite=loop.trained_tokens.stated_not_finite(),
        )

    @delay_sigterm()
    def _store_failure(self, error: Exception, *, is_internal: bool) -> None:
        """Store a record of the error that ended the loop or its observation, if the tokens are known."""
        tokens = self._loop.input_watch.tokens
        if tokens is None:
            return
        cell = observed_cell(self._loop, self._model, self.request, [tokens])
        failure = describe_failure(error, self._log, cell.cluster)
        place = "bench.observe, not in the training loop" if is_internal else user_frame(error)
        if is_lost_peer_failure(failure):
            # A peer has ended. If it can still store its own error, that record is the one that counts.
            time.sleep(LOST_PEER_WAIT_S)
        end = RankEnd(dist.get_rank(), ExitCode.FAILED, None, failure, log_tail="")
        self._store_end(cell, end, f" (in {place})")

    def _store_hang(self, end: RankEnd) -> None:
        """Store a record of a step that hangs, from the watchdog's thread."""
        print_message(f"rank {end.rank}: {end.hang}")
        tokens = self._loop.input_watch.latest_tokens()
        if tokens is not None:
            self._store_end(observed_cell(self._loop, self._model, self.request, [tokens]), end)

    def _store_end(self, cell: Cell, end: RankEnd, place: str = "") -> None:
        """Store the record of a loop that has ended or hangs, and print it."""
        wall_s = time.monotonic() - self._start
        record = failed_record(cell, end, wall_s, self._started_at)
        with Store(self.request.folder, STORE_WAIT_S) as store:
            self.record = store_once(replace(record, reason=f"{record.reason}{place}"), store)
        print_message(f"{outcome(self.record)}; record in {self.request.folder}")

    def _report_missing_steps(self) -> None:
        """Print, when the script ends, that it ran too few steps for a record."""
        if not self._is_over and self._is_rank_0:
            print_message(
                f"{self.request.steps_needed} steps are needed, but only {self._steps} were observed, so no"
                " record was written; train longer, or pass a smaller steps="
            )


def print_message(text: str, stream: TextIO | None = None) -> None:
    """Print one line, to stderr by default. A closed stream is ignored, so that the training continues."""
    with suppress(Exception):
        print(f"bench.observe: {text}", file=stream or sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """Return type and first line of an error, such as `KeyError: 'scatter'`; no type for a ConfigError."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ConfigError) else f"{type(error).__name__}: {first}".removesuffix(": ")
