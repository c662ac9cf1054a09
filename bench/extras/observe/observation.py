"""One model's steps: what begins and ends them, and what is written when they are over.

The first steps pay for what happens once, the next are timed with nothing else in them, a few more are
looked at from inside. Then the record is written, and the context does nothing any more. Nor does it after an
error of its own: that is told in one line, and the training goes on.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import ClassVar, Self, TextIO
from weakref import WeakKeyDictionary

import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from bench.common.labels import checks_label
from bench.config import ConfigError, ExitCode
from bench.extras.observe.cell import ObserveRequest, observed_cell
from bench.extras.observe.loop import Loop, LoopFullLength, LoopParity, LoopReplicas
from bench.extras.observe.loop_ranks import (
    Meetings,
    PeerStoppedError,
    agreed_time,
    device_of,
    gathered_on_rank_0,
    sigterm_held_back,
)
from bench.extras.observe.observed_model import observed_model, refuse_compiled
from bench.extras.observe.observed_record import (
    check_records,
    failed_record,
    kept,
    observed_record,
    report,
    sharing,
)
from bench.extras.observe.parity import Sharers
from bench.extras.observe.tokens import LoopReport
from bench.measure import decoded
from bench.measure.rank_pass import Measurement, StepRequest
from bench.ranks.device import nccl_version
from bench.ranks.log import RankLog
from bench.record.record import Record, Status
from bench.record.store import Store, StoreError
from bench.run.cell.outcome import outcome
from bench.run.node.failure import describe_failure
from bench.run.node.ranks import RankEnd, lost_a_peer

LOST_PEER_WAIT_S = 1.0
"""How long the record of a peer that left may still come; the launcher of the ranks ends the others soon."""
STORE_WAIT_S = 10.0
"""Ranks that meet the same error write one after another."""


class Observation:
    """One model's steps, observed; `record` is there on rank 0 when it is over."""

    made: ClassVar[int] = 0
    """How many were made: it names an observation in the same way on all ranks."""
    inside: ClassVar[Observation | None] = None
    of_models: ClassVar[WeakKeyDictionary[nn.Module, Observation]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, request: ObserveRequest) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "bench.observe: there is no process group; start the script with torchrun, even on one"
                " device, and call torch.distributed.init_process_group first"
            )
        self.request = request
        self.record: Record | None = None
        self._start = time.monotonic()
        self._log = RankLog(lambda _: None)
        self._speaks = dist.get_rank() == 0
        self._seen = 0
        self._is_prepared = self._is_over = False
        Observation.made += 1
        with self._own_work(refusals=(ConfigError, StoreError)):
            self._prepare(model, group)

    def _prepare(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """All that is needed before the first step; raises ConfigError for what cannot be observed."""
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        self._with_all = Meetings(f"{Observation.made} all", range(dist.get_world_size()))
        self._with_sharers = Meetings(f"{Observation.made} sharers", ranks)
        sharers = Sharers(ranks, group, self._with_sharers.hold)
        if self._speaks:
            check_records(self.request.folder)
        observed, device = observed_model(model), device_of(model)
        self._model = observed.model_config()
        self._loop = Loop(observed, sharers, device, self._log.step)
        self._measurement = Measurement(
            self.request.measure,
            device,
            self._log,
            meet=self._with_all.hold,
            instead={"parity": LoopParity, "full_length": LoopFullLength, "updates": LoopReplicas},
        )
        self._asks = self._measurement.steps(self._loop)
        self._with_all.hold()
        self._started_at = agreed_time(device)
        atexit.register(self._say_what_is_missing)
        self._is_prepared = True

    def __enter__(self) -> Self:
        if self._is_over:
            return self
        with self._own_work():
            if Observation.inside is not None:
                raise ConfigError(
                    "another step is being observed; observe one model at a time, such as the teacher in a"
                    " run of its own"
                )
            if self._seen == 0:
                refuse_compiled(self._loop.model.called[0])
            while next(self._asks) is StepRequest.BETWEEN:
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
        if error is not None:
            self._end_with(error, is_ours=False)
            return
        with self._own_work():
            if next(self._asks, None) is None:
                self._finish()
                self._is_over = True

    def loss(self, loss: Tensor | float | None = None, valid_tokens: Tensor | float | None = None) -> None:
        """Say what a step trains on, so that its objective is checked: the mean loss of next tokens.

        `loss` is the one that backward is called on, before any scaling, once for each micro-step;
        `valid_tokens` is how many of this rank's tokens are behind it, by default those of the labels that
        the model was given. Call it in every step: one of them is compared, and all have to be finite.
        """
        if not self._is_over:
            self._loop.trained.tell(self._seen, loss, valid_tokens)

    @contextmanager
    def _own_work(self, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Around what is not the user's: errors other than `refusals` end the observation, nothing else.

        They may be one rank's alone.
        """
        try:
            yield
        except BaseException as error:
            is_ours = isinstance(error, Exception) and not isinstance(error, refusals)
            self._end_with(error if is_ours else None, is_ours=True)
            if not is_ours:
                raise
        else:
            if self._is_over:
                self._let_go()

    def _end_with(self, error: BaseException | None, *, is_ours: bool) -> None:
        """The observation is over: no rank waits for this one, and a record is kept of the error if possible.

        The error is the user's step's, which goes on whatever else fails here, or one of our own.
        """
        self._is_over = True
        with suppress(Exception):
            self._with_all.leave()
            self._with_sharers.leave()
        said = []
        if is_ours and isinstance(error, Exception):
            said.append(f"observes no further, the training goes on: {in_one_line(error)}")
        try:
            if self._is_prepared:
                self._asks.close()
                if isinstance(error, Exception) and not isinstance(error, PeerStoppedError):
                    self._keep_failure(error, " (in the observation, not in the loop)" if is_ours else "")
        except Exception as another:  # noqa: BLE001  it would end the training, or stand in for the user's error
            said.append(f"no record: {in_one_line(another)}")
        if said and self.record is None:
            say("; ".join(said))
        self._let_go()

    def _let_go(self) -> None:
        """Hold the model no longer: the table by models, and the interpreter's end, hold this."""
        atexit.unregister(self._say_what_is_missing)
        held = vars(self)
        if "_measurement" in held:
            self._measurement.passes.clear()  # each holds the measurement, which holds the model
        for name in ("_loop", "_measurement", "_asks"):
            held.pop(name, None)

    def _finish(self) -> None:
        """Bring the ranks' reports together, judge them and write the record, on rank 0."""
        own = self._report()
        self._with_all.hold()
        reports = gathered_on_rank_0(own)
        if not reports:
            return
        groups, wall_s = sharing(reports), time.monotonic() - self._start
        cell = observed_cell(self._loop, self._model, self.request, groups[0])
        with Store(self.request.folder, STORE_WAIT_S) as store:
            repeat = sum(record.cell_id == cell.cell_id for record in store.read())
            record = kept(observed_record(cell, reports, groups, repeat, wall_s, self._started_at), store)
        self.record = record
        say(outcome(record), sys.stdout)
        if record.status is Status.OK:
            reasons = {check.what: check.reason for check in record.checks or ()}
            say(checks_label(reasons), sys.stdout)
        if self.request.report:
            try:
                report(self.request.folder)
            except Exception as error:  # noqa: BLE001  the record is kept, and nothing else counts
                say(f"no report: {in_one_line(error)}")

    def _report(self) -> LoopReport:
        loop, software = self._loop, nccl_version(self._measurement.device)
        values = {**self._measurement.report(), "phases_s": self._log.phases_s, "software": software}
        (report,) = decoded([values])
        stated = loop.trained.stated_not_finite()
        return LoopReport(report, loop.tokens, loop.sizes, loop.other_layers, loop.objective, stated)

    @sigterm_held_back()
    def _keep_failure(self, error: Exception, whose: str) -> None:
        """Keep what ended the loop or its observation, unless nothing is known of the tokens.

        `whose` is added to what the error says. Of an error that several ranks meet there is one record.
        """
        tokens = self._loop.fed.tokens
        if tokens is None:
            return
        cell = observed_cell(self._loop, self._model, self.request, [tokens])
        failure = describe_failure(error, self._log, cell.cluster)
        if lost_a_peer(failure):
            # A peer is gone; if it can still say why, its record is the one that counts.
            time.sleep(LOST_PEER_WAIT_S)
        else:
            first, *rest = failure.message.split("\n", 1)
            failure = replace(failure, message="\n".join([first + whose, *rest]))
        end = RankEnd(dist.get_rank(), ExitCode.FAILED, None, failure, log_tail="")
        wall_s = time.monotonic() - self._start
        with Store(self.request.folder, STORE_WAIT_S) as store:
            self.record = kept(failed_record(cell, end, wall_s, self._started_at), store)
        say(f"{outcome(self.record)}; record in {self.request.folder}")

    def _say_what_is_missing(self) -> None:
        if not self._is_over and self._speaks:
            say(
                f"saw {self._seen} of the {self.request.steps_needed} steps that it needs, and wrote nothing;"
                " run longer, or observe fewer steps with steps="
            )


def say(text: str, where: TextIO | None = None) -> None:
    """A line of ours, by default among the warnings; a closed terminal ends no training."""
    with suppress(Exception):
        print(f"bench.observe: {text}", file=where or sys.stderr, flush=True)


def in_one_line(error: Exception) -> str:
    """`KeyError: 'scatter'`, and no more of an error whose text has many lines; only the text of our own."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ConfigError) else f"{type(error).__name__}: {first}".removesuffix(": ")
