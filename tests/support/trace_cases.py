"""Steps on real gloo ranks whose use of time is known beforehand."""

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
from bench.measure.trace import tracer as tracer_module
from bench.measure.trace.section import RankTracedSteps
from bench.measure.trace.tracer import StepTracer, read_step

SLEEP_S = 0.4
PROFILER_STARTS_LATE_S = 0.2
TRACED = 2
PAYLOAD = 1 << 12
BIG_PAYLOAD = 1 << 18
MATRIX_SIZE = 1800
"""Rows of a matrix whose product takes long: on a busy machine a rank loses its core between operators."""


class Optimizer:
    """Optimizer of a traced step, which does nothing."""

    def update(self):
        return None


class LateProfiler(profile):
    """Profiler that starts later on rank 1 than on other ranks."""

    def start(self):
        super().start()
        if dist.get_rank() == 1:
            time.sleep(PROFILER_STARTS_LATE_S)


@dataclass
class Case:
    """Synthetic steps of one rank; code inside `watch` counts as attention."""

    rank: int
    watch: AttentionWatch
    optimizer: Optimizer

    def sleep_before_all_to_all(self):
        """Let rank 1 be late for an all-to-all of attention, then all-reduce a gradient."""
        if self.rank == 1:
            time.sleep(SLEEP_S)
        self.watch._enter()
        sent = torch.ones(PAYLOAD)
        dist.all_to_all_single(torch.empty_like(sent), sent)
        self.watch._leave()
        dist.all_reduce(torch.ones(PAYLOAD))

    def hide_all_reduce_behind_compute(self):
        """Multiply matrices while an all-reduce is in flight, and long after it has ended."""
        sent, matrix = torch.ones(BIG_PAYLOAD), torch.ones(MATRIX_SIZE, MATRIX_SIZE)
        work = dist.all_reduce(sent, async_op=True)
        for _ in range(4):
            torch.mm(matrix, matrix)
        work.wait()

    def pass_on_late(self):
        """Send around a ring in which rank 0 is late: only the next rank waits for long."""
        size = dist.get_world_size()
        sent, received = torch.ones(PAYLOAD), torch.empty(PAYLOAD)
        self.watch._enter()
        if self.rank == 0:
            time.sleep(SLEEP_S)
        sends = [
            dist.P2POp(dist.isend, sent, (self.rank + 1) % size),
            dist.P2POp(dist.irecv, received, (self.rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        self.watch._leave()


def trace_case(job, log):
    """Run the case that the folder is named after on a rank: once under the tap, then traced."""
    from bench.run.node.worker import join

    if job.folder.name == Case.pass_on_late.__name__:
        tracer_module.profile = LateProfiler
    device = join(job)
    case = Case(job.rank, AttentionWatch(), Optimizer())
    run_step = getattr(case, job.folder.name)
    with CommunicationTap(case.watch) as tap:
        run_step()
    traced_tap = CommunicationTap(case.watch)
    with log.run_phase("trace"):
        optimizing = partial(method_spans, case.optimizer, "update")
        tracer = StepTracer(case.watch, optimizing, lambda: traced_tap, device, job.folder)
        tracer.warm_up()
        for _ in range(TRACED):
            with tracer.step():
                run_step()
    members = [call.members for call in traced_tap.calls]
    assert members == TRACED * [call.members for call in tap.calls]
    calls = [asdict(call) for call in traced_tap.calls]
    (job.folder / f"calls-{job.rank}.json").write_text(json.dumps(calls))
    steps = RankTracedSteps(steps=[read_step(traced, tap.calls, "cpu") for traced in tracer.traced], median=0)
    return {"trace": to_builtins(steps), "phases_s": log.phases_s}
