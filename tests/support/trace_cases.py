"""Steps on real gloo ranks of which it is known where their time went."""

import json
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from msgspec import to_builtins
from torch.profiler import profile

from bench.attention.watch import AttentionWatch
from bench.measure.hooks import method_spans
from bench.measure.tap import CommunicationTap
from bench.measure.trace import trace
from bench.measure.trace.section import RankSteps
from bench.measure.trace.trace import StepTracer, read_step

SLEEP_S = 0.4
PROFILER_STARTS_LATE_S = 0.2
TRACED = 2
PAYLOAD = 1 << 12
BIG_PAYLOAD = 1 << 18
MATRIX_SIZE = 1800
"""Few long products rather than many short ones: between two operators a busy machine takes the core away."""


class Optimizer:
    """The part of an engine that a traced step asks for."""

    def update(self):
        return None


class LateProfiler(profile):
    """torch's profiler where it takes longer to start on some ranks than on others."""

    def start(self):
        super().start()
        if dist.get_rank() == 1:
            time.sleep(PROFILER_STARTS_LATE_S)


@dataclass
class Case:
    """One rank of a synthetic step; attention is whatever runs inside `watch`."""

    rank: int
    watch: AttentionWatch
    optimizer: Optimizer

    def sleep_before_the_exchange(self):
        """Rank 1 comes late to an exchange of attention, then all meet again for a gradient."""
        if self.rank == 1:
            time.sleep(SLEEP_S)
        self.watch._enter()
        sent = torch.ones(PAYLOAD)
        dist.all_to_all_single(torch.empty_like(sent), sent)
        self.watch._leave()
        dist.all_reduce(torch.ones(PAYLOAD))

    def hide_an_exchange_behind_compute(self):
        """An all-reduce is in flight while this rank multiplies, and done long before it stops."""
        sent, matrix = torch.ones(BIG_PAYLOAD), torch.ones(MATRIX_SIZE, MATRIX_SIZE)
        work = dist.all_reduce(sent, async_op=True)
        for _ in range(4):
            torch.mm(matrix, matrix)
        work.wait()

    def pass_on_late(self):
        """A ring whose rank 0 sends late: its follower waits for it, nobody else does for long."""
        size = dist.get_world_size()
        sent, received = torch.ones(PAYLOAD), torch.empty(PAYLOAD)
        self.watch._enter()
        if self.rank == 0:
            time.sleep(SLEEP_S)
        hops = [
            dist.P2POp(dist.isend, sent, (self.rank + 1) % size),
            dist.P2POp(dist.irecv, received, (self.rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(hops):
            work.wait()
        self.watch._leave()


def trace_case(job, log):
    """A rank's whole life: the case named by the folder, tapped once, then traced."""
    from bench.run.node.worker import join

    if job.folder.name == Case.pass_on_late.__name__:
        trace.profile = LateProfiler
    device = join(job)
    case = Case(job.rank, AttentionWatch(), Optimizer())
    run_step = getattr(case, job.folder.name)
    with CommunicationTap(case.watch) as tap:
        run_step()
    again = CommunicationTap(case.watch)
    with log.during("trace"):
        optimizing = partial(method_spans, case.optimizer, "update")
        tracer = StepTracer(case.watch, optimizing, lambda: again, device, job.folder)
        tracer.warm()
        for _ in range(TRACED):
            with tracer.step():
                run_step()
    made = [call.members for call in again.calls]
    assert made == TRACED * [call.members for call in tap.calls]
    calls = [asdict(call) for call in again.calls]
    (job.folder / f"calls-{job.rank}.json").write_text(json.dumps(calls))
    read = RankSteps(steps=[read_step(each, tap.calls, "cpu") for each in tracer.traced], median=0)
    return {"trace": to_builtins(read), "phases_s": log.phases_s}
