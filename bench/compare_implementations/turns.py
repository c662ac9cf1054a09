"""A rank's whole life in a comparison: every implementation is looked at once, then all take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.attention.watch import AttentionWatch
from bench.compare_implementations.request import LOOK_AT, Request
from bench.config import RunConfig
from bench.node.job import RankJob
from bench.node.worker import join
from bench.passes.memory.allocations import AllocationTracker
from bench.passes.parity.attention import check_attention, random_inputs
from bench.passes.tap import CommunicationTap
from bench.passes.timing.clock import synchronise
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog
from bench.strategies import STRATEGIES, runnable
from bench.training.models import TORCH_DTYPES

WARM_UP_CALLS = 1
LEAST_ROUNDS, MOST_ROUNDS = 2, 20
SETTLE_S = 0.05
"""Before memory is counted: gloo's threads hold a call's last buffers until they are given a core again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What does not vary from process to process, of one implementation on one rank."""

    failure: str | None = None
    """Why it takes no turn."""
    errors: dict[str, float] | None = None
    """By tensor, in units of the last place of the exact tensor's largest element."""
    sent_bytes: int | None = None
    """Handed to others in one call, forward and backward."""
    peak_bytes: int | None = None
    """The most that tensors held in one call, beyond what was there before."""


class Call:
    """One implementation on this rank."""

    def __init__(self, cell: RunConfig, device: torch.device) -> None:
        self.cell, self.device = cell, device
        self.strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        q, k, v, self.dout = self._shards()
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.causal = cell.workload.mask == "causal"

    def __call__(self) -> None:
        """Attention forward and backward on this rank's shard."""
        self.forget()
        self.strategy.attention(*self.leaves, causal=self.causal).backward(self.dout)

    def forget(self) -> None:
        """Drop the last call's gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def time_ms(self) -> float:
        """From a barrier to the end of this rank's work on its device."""
        dist.barrier()
        synchronise(self.device)
        start = time.perf_counter()
        self()
        synchronise(self.device)
        return (time.perf_counter() - start) * 1e3

    def looked_at(self) -> Looked:
        """Its errors at no more than 512 tokens, and its bytes and its memory at the full length."""
        parity = check_attention(self.strategy, self.device, causal=self.causal)
        if parity.divergence is not None:
            return Looked(failure=f"wrong result: {parity.divergence}")
        self()
        with CommunicationTap(AttentionWatch()) as tap:
            self()
        last_place = torch.finfo(TORCH_DTYPES[self.cell.dtype]).eps
        return Looked(
            errors={name: error / last_place for name, error in parity.errors.items()},
            sent_bytes=sum(tap.sent_bytes().values()),
            peak_bytes=self._peak_bytes(),
        )

    def _peak_bytes(self) -> int:
        """Beyond what was there before the call: the inputs are left out, their gradients are not."""
        self.forget()
        return PEAKS[self.device.type](self)

    def _shards(self) -> list[torch.Tensor]:
        whole = random_inputs(self.cell, self.cell.seq_len, self.device)
        pieces = self.strategy.slices(self.cell.seq_len)
        return [torch.cat([x[:, :, piece] for piece in pieces], dim=2) for x in whole]


def in_turns(job: RankJob, log: RankLog, request: Request) -> dict[str, Any]:
    """Milliseconds of every call of every implementation, and what was looked at, in the cells' order."""
    with log.during("join"):
        device = join(job)
        cells = [RunConfig.from_json(each) for each in request.cells]
    calls, looked = list[Call | None](), list[Looked]()
    for number, cell in enumerate(cells):
        with log.during(f"{LOOK_AT}{number}"):
            call, found = _looked_at(cell, device, whole=request.is_first)
            calls.append(call)
            looked.append(found)
    with log.during("turns"):
        times_ms = _turns(calls, request.budget_s, device)
    return {"looked": [asdict(each) for each in looked], "times_ms": times_ms}


def _looked_at(cell: RunConfig, device: torch.device, *, whole: bool) -> tuple[Call | None, Looked]:
    """An implementation that raises on any rank takes no turn on any."""
    call, found = None, Looked()
    try:
        call = Call(cell, device)
        found = call.looked_at() if whole else found
    except Exception as error:  # noqa: BLE001  whatever a package raises is what is known of it
        first_line = (str(error).strip().splitlines() or [""])[0]
        found = Looked(failure=f"{type(error).__name__}: {first_line}")
    failed = torch.tensor([found.failure is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    return (None if failed.item() else call), found


def _turns(calls: Sequence[Call | None], budget_s: float, device: torch.device) -> list[list[float]]:
    """Rounds in which each takes one turn, beginning with another each time: neighbours change too slowly."""
    playing = [number for number, call in enumerate(calls) if call is not None]
    times_ms: list[list[float]] = [[] for _ in calls]

    def play(first: int) -> float:
        start = time.perf_counter()
        for number in [*playing[first:], *playing[:first]]:
            call = calls[number]
            assert call is not None
            times_ms[number].append(call.time_ms())
        return time.perf_counter() - start

    round_s = torch.tensor([play(0) for _ in range(WARM_UP_CALLS)][-1:], device=device)
    dist.all_reduce(round_s, dist.ReduceOp.MAX)
    rounds = min(max(int(budget_s / round_s.item()), LEAST_ROUNDS), MOST_ROUNDS)
    for number in range(rounds):
        play(number * len(playing) // rounds)
    return [times[WARM_UP_CALLS:] for times in times_ms]


def _tensors_peak_bytes(call: Call) -> int:
    gc.collect()  # or what earlier calls left would be freed meanwhile
    time.sleep(SETTLE_S)
    with AllocationTracker() as before:
        pass
    with AllocationTracker() as tracker:
        call()
    return tracker.peak_bytes - before.peak_bytes


def _allocators_peak_bytes(call: Call) -> int:
    torch.cuda.reset_peak_memory_stats(call.device)
    before_bytes = torch.cuda.memory_allocated(call.device)
    call()
    synchronise(call.device)
    return torch.cuda.max_memory_allocated(call.device) - before_bytes


PEAKS: Mapping[str, Callable[[Call], int]] = {"cpu": _tensors_peak_bytes, "cuda": _allocators_peak_bytes}
"""How a call's memory is counted, by device."""
