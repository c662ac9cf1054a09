"""Thread that notices a step that hangs, and finds the rank that keeps the others waiting."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from bench.extras.observe.loop_ranks import collective_timeout_s
from bench.ranks.log import RankLog, RankState
from bench.run.cell.hang import explain_hang
from bench.run.node.ranks import RankEnd
from bench.run.node.stacks import RankActivity, read_activity

LIMIT_OF_TIMEOUT = 0.8
"""Longest step, as a share of the timeout of a collective, after which a backend may end the process."""
POLLS = 25
"""Number of looks within the time limit; a rank has two of them to write its stacks."""


class StepWatchdog:
    """Calls `on_hang` on one rank, in a thread, if a step does not end, with the stacks of all ranks."""

    def __init__(self, name: str, log: RankLog, device: str, on_hang: Callable[[RankEnd], None]) -> None:
        store: Any = _get_default_store()  # a clone, because a call that waits blocks its store
        self._store = PrefixStore(f"bench.observe {name} stacks", store.clone())
        self._log, self._device, self._on_hang = log, device, on_hang
        self._limit_s = LIMIT_OF_TIMEOUT * collective_timeout_s()
        self._loop_thread = threading.get_ident()
        self.stop_event = threading.Event()
        self.record_progress(is_in_step=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def record_progress(self, *, is_in_step: bool) -> None:
        self._is_in_step, self._progressed_s = is_in_step, time.monotonic()

    def _watch(self) -> None:
        pause_s = self._limit_s / POLLS
        with suppress(Exception):  # the store may be lost, or the observation may end meanwhile
            while not self.stop_event.wait(pause_s):
                idle_s, rank = time.monotonic() - self._progressed_s, str(dist.get_rank())
                if self._is_in_step and idle_s > self._limit_s:
                    self._store.compare_set("reporter", "", rank)
                if idle_s > self._limit_s / 2 and self._store.check(["reporter"]):
                    state = self._log.phase, self._log.step.name, self._stacks()
                    self._store.set(rank, json.dumps(state))
                    if self._store.get("reporter").decode() == rank:
                        self.stop_event.wait(2 * pause_s)
                        self._report()
                    return

    def _report(self) -> None:
        """Call `on_hang` with the rank that is probably the cause, its place, and the stacks of all ranks."""
        ranks = range(dist.get_world_size())
        answers = {rank: self._store.get(str(rank)) for rank in ranks if self._store.check([str(rank)])}
        states = {rank: json.loads(answer) for rank, answer in answers.items()}
        stacks = {rank: states[rank][2] if rank in states else "no answer" for rank in ranks}
        activities = {rank: read_activity(stacks[rank], self._device) or RankActivity() for rank in ranks}
        cause = explain_hang(activities)
        phase, step_phase, _ = states.get(cause.rank, ("unknown phase", None, None))
        self._on_hang(
            RankEnd(
                cause.rank, None, None, None,
                log_tail="\n".join(f"rank {rank}:\n{text}" for rank, text in stacks.items()),
                state=RankState(phase, step_phase),
                hang=f"no step has ended for {self._limit_s:.0f} s: {cause.message}",
            )
        )  # fmt: skip

    def _stacks(self) -> str:
        """Return the stacks of other threads in faulthandler's format, with the loop's as the current one."""
        lines = []
        for thread, frame in sys._current_frames().items():
            if thread == threading.get_ident():
                continue
            kind = "Current thread" if thread == self._loop_thread else "Thread"
            lines.append(f"{kind} {thread:#x} (most recent call first):")
            for caller, line in traceback.walk_stack(frame):
                lines.append(f'  File "{caller.f_code.co_filename}", line {line} in {caller.f_code.co_name}')
        return "\n".join(lines)
