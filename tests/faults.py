"""What can go wrong in a rank, as entries the launcher runs in place of `run_cell`."""

import os
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

import bench.strategies.ring.attention as ring
import bench.strategies.ulysses.attention as ulysses
import bench.training.trainers.native
from bench.attention.kernels import call, math
from bench.attention.merge import Partial
from bench.node.worker import join, run_cell
from bench.overhead.turns import compare
from bench.passes.objective import rank as objective
from bench.passes.objective import section as objective_section
from bench.passes.parity.section import MAX_TOKENS
from bench.passes.timing.clock import StepClock
from bench.strategies import runnable
from bench.strategies.local.attention import LocalAttention
from bench.strategies.ring.attention import Ring
from bench.strategies.strategy import IGNORED_LABEL, Batch, Strategy
from bench.training import models
from bench.training.trainers.native import NativeTrainer


def raise_in_rank_1(job, log):
    if job.rank == 1:
        with log.during("build"):
            raise ValueError("a rank that raises")
    return run_cell(job, log)


def sleep_in_rank_1(job, log):
    if job.rank == 1:
        time.sleep(3600)
    return run_cell(job, log)


def run_out_of_memory_in_rank_1(job, log):
    if job.rank == 1:
        bytearray(2**60)
    return run_cell(job, log)


def run_out_of_memory_in_rank_1_and_hang_up_first(job, log):
    """The others lose their connection long before the cause is told: longer than `short_grace`."""
    join(job)
    dist.barrier()
    if job.rank == 1:
        try:
            run_out_of_memory_in_rank_1(job, log)
        finally:
            dist.destroy_process_group()
            time.sleep(2.5)
    dist.all_reduce(torch.ones(2**20))
    return {}


def run_out_of_memory_and_fail_in_cleanup(job, log):
    """A library's own cleanup trips over the failed allocation."""
    if job.rank == 1:
        try:
            run_out_of_memory_in_rank_1(job, log)
        except MemoryError as error:
            raise RuntimeError("cannot close what was never opened") from error
    return run_cell(job, log)


def run_out_of_memory_and_never_leave(job, log):
    """The error is on its way out of the rank's phase, and something further out never comes back."""
    if job.rank == 1:
        try:
            with log.during("build"):
                run_out_of_memory_in_rank_1(job, log)
        finally:
            time.sleep(3600)
    return run_cell(job, log)


def abort_like_a_limit_in_rank_1(job, log):
    """What glibc says and does where a thread's own data finds no room."""
    if job.rank == 1:
        os.write(2, b"cannot allocate memory for thread-local data: ABORT\n")
        os._exit(127)
    return run_cell(job, log)


def have_no_room(job, log):
    """A machine on which a second model does not fit."""
    objective.CPU_ROOM_BYTES = 0
    return run_cell(job, log)


def have_room_for_a_cut(job, log):
    """A machine on which the whole model in float64 does not fit, and two layers of it do."""
    objective.needed_bytes = lambda cell, tokens: 2**60 if cell.model == job.cell.model else 0
    return run_cell(job, log)


def average_losses_in_a_cut(job, log):
    objective.needed_bytes = lambda cell, tokens: 2**60 if cell.model == job.cell.model else 0
    return average_losses_over_ranks(job, log)


def divide_by_sp_degree(job, log):
    """The classic mistake: a loss averaged once more over the ranks that share a sequence."""
    right = bench.training.trainers.native.backward_loss
    bench.training.trainers.native.backward_loss = lambda *loss: right(*loss) / job.cell.sp_degree
    return run_cell(job, log)


def forget_to_shard_rank_1(job, log):
    """A silent fault of real trainers: a rank trains on its neighbour's tokens again."""

    def first_shard(self, batch):
        size = batch.input_ids.shape[1] // self.cell.sp_degree
        parts = (batch.input_ids, batch.labels, batch.position_ids)
        return Batch(batch.samples, *(part[:, :size] for part in parts))

    if job.rank == 1:
        Strategy.shard = first_shard
    return run_cell(job, log)


def forget_documents(job, log):
    """Packing that a configuration accepts and no strategy is told of."""
    Strategy.packed = lambda self, documents: nullcontext()
    return run_cell(job, log)


def let_positions_go_on(job, log):
    """Positions that go on in the next document: attention by rotary ones is the same."""
    shard = Strategy.shard

    def with_positions(self, batch):
        tokens = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        return shard(self, replace(batch, position_ids=tokens))

    Strategy.shard = with_positions
    return run_cell(job, log)


def label_the_last_token_of_documents(job, log):
    """The next document's first token is what it is to predict; before the first counted label none is."""
    shard = Strategy.shard

    def with_labels(self, batch):
        follows = batch.position_ids.roll(-1, dims=1) == 0
        follows[:, -1] = False
        follows &= (batch.labels != IGNORED_LABEL).long().cummax(dim=1).values.bool()
        labels = torch.where(follows, batch.input_ids.roll(-1, dims=1), batch.labels)
        return shard(self, replace(batch, labels=labels))

    Strategy.shard = with_labels
    return run_cell(job, log)


def attend_locally(job, log):
    """A strategy that the configuration accepts and nobody applies."""
    runnable(job.cell.strategy).attention = LocalAttention.attention
    return run_cell(job, log)


def drop_a_ring_step(job, log):
    """One rank's keys are never looked at, and never sent."""
    sources = Ring.sources
    Ring.sources = lambda self: sources(self)[:-1]
    return run_cell(job, log)


def choose_frequencies_by_own_length(job, log):
    """As transformers does: by the largest position that a rank is given."""
    models.BY_LENGTH = ()
    return run_cell(job, log)


def contiguous_positions_with_zigzag(job, log):
    """Tokens in the order of one layout, positions in that of another."""
    shard = Strategy.shard

    def misplaced(self, batch):
        right = shard(self, batch)
        size = right.input_ids.shape[1]
        start = self.groups.sequence_rank * size
        return replace(right, position_ids=batch.position_ids[:, start : start + size])

    Strategy.shard = misplaced
    return run_cell(job, log)


def average_losses_over_ranks(job, log):
    """Each rank its own mean, then the mean over ranks: tokens of ranks with few of them weigh more."""
    count, local = bench.training.trainers.native.count_valid, []

    def counted(labels):
        local.append(count(labels))
        return local[-1]

    bench.training.trainers.native.count_valid = counted
    bench.training.trainers.native.backward_loss = lambda loss_sum, *_: loss_sum / local[-1].clamp(min=1)
    return run_cell(job, log)


def withhold_the_documents(job, log):
    """Positions begin anew with every document, and attention is not told where one ends."""
    Strategy.packed = lambda *_: nullcontext()
    return run_cell(job, log)


def shift_labels_after_sharding(job, log):
    """The last token of every piece has no label: its successor lies on another rank."""
    shard = Strategy.shard

    def unlabelled(self, batch):
        labels = batch.labels.clone()
        for rank in range(self.cell.sp_degree):
            for piece in self.facts.slices(self.cell, labels.shape[1], rank):
                labels[:, piece.stop - 1] = IGNORED_LABEL
        return shard(self, replace(batch, labels=labels))

    Strategy.shard = unlabelled
    return run_cell(job, log)


def see_one_token_too_far(job, log):
    """The causal triangle one diagonal too high."""
    scores = math._scores

    def shifted(q, k, causal, scale):
        if not causal:
            return scores(q, k, causal, scale)
        product = scores(q, k, False, scale)
        mask = torch.ones(product.shape[-2:], dtype=torch.bool).triu(diagonal=2)
        return product.masked_fill(mask, float("-inf"))

    math._scores = shifted
    return run_cell(job, log)


def skip_the_lse_rescale(job, log):
    """Partial outputs added as if each had seen all keys."""

    def added(self, rows, out, lse):
        self.out[:, :, rows] += out

    Partial.merge = added
    return run_cell(job, log)


def tile_the_kv_heads(job, log):
    """Heads 0 1 0 1 where 0 0 1 1 was meant: the classic mistake of GQA."""
    call._repeat = lambda kv, groups: kv.repeat(1, groups, 1, 1)
    return run_cell(job, log)


def sum_gradients_over_the_ranks(job, log):
    """Gradients come out sp_degree times too large; the forward is right."""
    attention = ulysses.UlyssesAttention.attention
    extra = job.cell.sp_degree - 1

    def summed(self, *qkv, causal=True):
        return attention(self, *(x + extra * (x - x.detach()) for x in qkv), causal=causal)

    ulysses.UlyssesAttention.attention = summed
    return run_cell(job, log)


def reuse_the_first_block_in_backward(job, log):
    """A ring whose backward never looks at the blocks that pass by; the forward is right."""
    backward = ring.ring_backward

    def wrong(dout, q, kv, out, lse, plan):
        ring.kernel_backward = lambda kernel, d, q_, k_, v_, *rest, **mask: kernel_backward(
            kernel, d, q_, kv[0][:, :, : k_.shape[2]], kv[1][:, :, : v_.shape[2]], *rest, **mask
        )
        return backward(dout, q, kv, out, lse, plan)

    kernel_backward = ring.kernel_backward
    ring.ring_backward = wrong
    return run_cell(job, log)


def fill_a_permuted_buffer(job, log):
    """`empty_like` of a permuted view: gloo fills it in the wrong order, forward exact, gradients not."""

    def exchange(parts, group):
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    ulysses._exchange = exchange
    return run_cell(job, log)


def lose_numbers_beyond_the_parity_check(job, log):
    """The output of all tokens after the 512th is nan, which no shorter sequence shows."""
    attention = ulysses.UlyssesAttention.attention

    def spoiled(self, q, *kv, causal=True):
        out = attention(self, q, *kv, causal=causal)
        positions = torch.arange(q.shape[2]) + self.groups.sequence_rank * q.shape[2]
        return torch.where((positions >= 512)[:, None], torch.nan, out)

    ulysses.UlyssesAttention.attention = spoiled
    return run_cell(job, log)


def lose_one_token_between_the_sampled_ones(job, log):
    """One row of rank 1's output, which is none of those compared with float64."""
    attention = ulysses.UlyssesAttention.attention

    def spoiled(self, q, *kv, causal=True):
        out = attention(self, q, *kv, causal=causal)
        if self.groups.rank == 1 and q.shape[2] * self.cell.sp_degree > 512:
            out = out.clone()
            out[:, :, 2] = torch.nan
        return out

    ulysses.UlyssesAttention.attention = spoiled
    return run_cell(job, log)


class _SpoilOneRow(torch.autograd.Function):
    """The identity, whose gradient has one row of nan, in its last head."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, -1, 2] = torch.nan
        return gradient


def _lose_a_row_of_the_value_gradient(job, log, is_where):
    """On rank 1, of sequences that the parity check does not see, in the calls that `is_where` names."""
    attention = ulysses.UlyssesAttention.attention

    def spoiled(self, q, k, v, causal=True):
        is_long = q.shape[2] * self.cell.sp_degree > MAX_TOKENS
        if self.groups.rank == 1 and is_long and is_where(self):
            v = _SpoilOneRow.apply(v)
        return attention(self, q, k, v, causal=causal)

    ulysses.UlyssesAttention.attention = spoiled
    return run_cell(job, log)


def lose_a_row_of_the_value_gradient_under_the_clock(job, log):
    return _lose_a_row_of_the_value_gradient(job, log, lambda strategy: strategy.watch is None)


def lose_a_row_of_the_value_gradient_while_inspected(job, log):
    return _lose_a_row_of_the_value_gradient(job, log, lambda strategy: strategy.watch is not None)


def overflow_a_gradient_in_step_2(job, log):
    """A gradient of rank 1 is infinite in one step; its loss is right."""
    accumulate = NativeTrainer.accumulate

    def overflown(self, number, seq_len):
        signal = accumulate(self, number, seq_len)
        if number == 2 and job.rank == 1:
            next(self.engine.full_gradients())[1].fill_(torch.inf)
        return signal

    NativeTrainer.accumulate = overflown
    return run_cell(job, log)


def lose_the_loss_of_rank_1_in_step_3(job, log):
    """Of a step under the clock; what the optimizer is told is right."""
    step = NativeTrainer.step

    def lost(self, number, seq_len):
        outcome = step(self, number, seq_len)
        is_lost = number == 3 and job.rank == 1
        return replace(outcome, loss_sum=outcome.loss_sum * torch.nan) if is_lost else outcome

    NativeTrainer.step = lost
    return run_cell(job, log)


def exchange_only_while_inspected(job, log):
    """Right in the checks of short sequences and under a dispatch mode; else nothing is sent."""
    exchange = ulysses._exchange

    def lazy(parts, group):
        is_short = parts.shape[-2] * group.size() <= objective_section.MAX_TOKENS
        is_inspected = torch._C._len_torch_dispatch_stack() > 0
        return exchange(parts, group) if is_short or is_inspected else parts.contiguous()

    ulysses._exchange = lazy
    return run_cell(job, log)


def slow_down_timed_steps(job, log, **rounds):
    """The marks of a timed step take time, and wait for the other ranks."""
    mark = StepClock.mark

    def slow_mark(self):
        time.sleep(0.02)
        dist.barrier()
        mark(self)

    StepClock.mark = slow_mark
    return compare(job, log, **rounds)


def _replace_a_full_step_of_rank_1(job, log, fault):
    """In the first step at full length rank 1 does this once its forward has begun."""
    accumulate = NativeTrainer.accumulate

    def faulty(self, number, seq_len):
        if job.rank == 1 and seq_len == job.cell.seq_len:
            self.phase.enter("forward")
            fault()
        return accumulate(self, number, seq_len)

    NativeTrainer.accumulate = faulty
    return run_cell(job, log)


def sleep_for_an_hour():
    time.sleep(3600)
