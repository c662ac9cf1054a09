"""Rounds of heads in `ulysses_chunked`: their order, their bytes, and the legal numbers of rounds."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes
from bench.strategies.schedule import wide_bytes
from bench.strategies.ulysses_chunked import rounds
from tests.support.cells import make_cell

MANY_HEADS = ("model=qwen3_nano", "model.num_heads=16", "model.num_kv_heads=8", "cluster.world_size=2")


@cache
def plain_cell():
    """Return a cell that is composed once, because that takes long."""
    return make_cell("strategy=ulysses_chunked", "seq_len=256", *MANY_HEADS)


def cell_with(heads, kv_heads, chunks, overlap="true"):
    """Return the plain cell with other heads and rounds."""
    cell = plain_cell()
    options = (("chunks", str(chunks)), ("overlap", overlap))
    return replace(cell, model=replace(cell.model, num_heads=heads, num_kv_heads=kv_heads), options=options)


@pytest.fixture
def group():
    """A fake process group of two ranks, of which only one runs; received tensors are not read."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """A process group of one rank, which receives what it sends."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def heads_of(count, dtype=torch.float32):
    """Return `count` heads of eight tokens, each filled with its index."""
    return torch.arange(count, dtype=dtype).reshape(1, -1, 1, 1).expand(1, -1, 8, 4).clone()


@pytest.fixture
def events(monkeypatch):
    """Messages, as heads of every tensor and direction, and indices of computed rounds, in order."""
    events, channels = [], []

    class RecordedChannel(rounds.AllToAllChannel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            channels.append(self)

        def start(self, parts):
            super().start(parts)
            direction = ("there", "back")[channels.index(self) % 2]
            events.append(f"{'+'.join(str(part.shape[1]) for part in parts)} {direction}")

    monkeypatch.setattr(rounds, "AllToAllChannel", RecordedChannel)
    return events


@pytest.mark.parametrize(
    ("kv_heads", "overlap", "order"),
    [
        (6, True, "2+1+1 there, 2+1+1 there, 0, 2+1+1 back, 2+1+1 there, 1, 2+1+1 back, 2, 2+1+1 back"),
        (6, False, "2+1+1 there, 0, 2+1+1 back, 2+1+1 there, 1, 2+1+1 back, 2+1+1 there, 2, 2+1+1 back"),
        (2, True, "2+1+1 there, 2 there, 0, 2 back, 2 there, 1, 2 back, 2, 2+1+1 back"),
        (2, False, "2+1+1 there, 0, 2 back, 2 there, 1, 2 back, 2 there, 2, 2+1+1 back"),
    ],
)
def test_rounds_send_heads_and_compute_in_this_order(group, events, kv_heads, overlap, order):
    """K and V are sent once, with the first round that they serve; their gradients with the last."""

    def compute(number, whole):
        events.append(str(number))
        return [x.clone() for x in whole]

    inputs = [torch.zeros(1, heads, 8, 4) for heads in (12, kv_heads, kv_heads)]
    rounds.Rounds(group, 3, overlap).run(inputs, [x.clone() for x in inputs], compute)
    assert ", ".join(events) == order


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [16, 4, 2])
def test_messages_of_rounds_match_the_schedule(group, events, kv_heads, chunks, overlap):
    """Messages are compared one by one, in forward and backward."""
    cell = cell_with(16, kv_heads, chunks, overlap)
    q, k, v = (torch.zeros(1, heads, 8, 4) for heads in (16, kv_heads, kv_heads))
    in_rounds = rounds.Rounds(group, chunks, overlap == "true")
    in_rounds.run((q, k, v), (q,), lambda _, whole: whole[:1])
    in_rounds.run((q, q, k, v, q), (q, k, v), lambda _, whole: [x.clone() for x in whole[1:4]])
    schedule = STRATEGIES["ulysses_chunked"].schedule(cell)
    a_head = activation_bytes(cell, cell.sp_degree) * (cell.sp_degree - 1) // cell.sp_degree
    assert [sum(map(int, event.split()[0].split("+"))) for event in events] == [
        communication.sent_bytes // a_head
        for stage in (*schedule.forward, *schedule.backward)
        for communication in stage.communications
    ]


LOST_IF_NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-30}
"""A number whose sum with one is one in this dtype, or in float32 for float64."""


@pytest.mark.parametrize("dtype", LOST_IF_NARROW)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_a_kv_head_are_summed_in_a_wide_dtype(alone, overlap, dtype):
    share = LOST_IF_NARROW[dtype]

    def compute(number, whole):
        """Return 1 in the first round of a KV head, and in later rounds a number lost in a narrow sum."""
        return whole[0], torch.full_like(whole[1], share if number % 5 else 1.0)

    q, kv = heads_of(10, dtype), heads_of(2, dtype)
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    rounds.Rounds(alone, 10, overlap).run((q, kv), (dq, dkv), compute)
    assert torch.equal(dkv, torch.full_like(kv, 1.0 + 4 * share))
    assert torch.equal(dq, q)


@pytest.mark.parametrize(
    ("kv_heads", "chunks", "of_a_round", "added"),
    [(16, 8, (1, 1), 0), (4, 1, (8, 2), 0), (4, 4, (2, 1), 2), (2, 2, (4, 1), 2), (1, 8, (1, 1), 2)],
)
def test_rounds_have_the_area_of_ulysses_and_merge_shared_kv(kv_heads, chunks, of_a_round, added):
    """Every kernel call of rounds that share a KV head adds the two wide gradients."""
    cell = cell_with(16, kv_heads, chunks)
    (whole,) = blocks_of(STRATEGIES["ulysses"].schedule(cell).forward)
    schedule = STRATEGIES["ulysses_chunked"].schedule(cell)
    for blocks in (blocks_of(schedule.forward), blocks_of(schedule.backward)):
        assert [(block.heads, block.kv_heads) for block in blocks] == [of_a_round] * chunks
        assert sum(block.area for block in blocks) == whole.area
    a_gradient = wide_bytes(cell, activation_bytes(cell, cell.sp_degree))
    merged = [stage.merged_bytes for stage in schedule.backward if stage.blocks]
    assert merged == [added * a_gradient] * chunks
    assert not any(stage.merged_bytes for stage in schedule.forward)


def blocks_of(stages):
    return [block for stage in stages for block in stage.blocks]


def test_auto_chunks_take_one_query_head_per_rank_and_round():
    assert plain_cell().option("chunks") == "8"


@pytest.mark.parametrize(
    ("kv_heads", "of_a_rank", "chunks", "legal"),
    [
        (8, 4, 3, "1 or 2 or 4 or 8"),
        (12, 6, 4, "1 or 2 or 3 or 6 or 12"),
        (2, 1, 8, "1 or 2 or 3 or 4 or 6 or 12"),
        (1, 1, 24, "1 or 2 or 3 or 4 or 6 or 12"),
    ],
)
def test_chunks_that_split_a_group_of_heads_are_refused(kv_heads, of_a_rank, chunks, legal):
    heads = 24 if "3" in legal else 16
    reason = refusal(cell_with(heads, kv_heads, chunks))
    assert reason.startswith(f"strategy.chunks={chunks} must divide")
    assert f"({of_a_rank} at sp_degree=2)" in reason
    assert f"({heads // 2}); choose {legal}, or leave strategy.chunks=auto" in reason
    for number in legal.split(" or "):
        assert refusal(cell_with(heads, kv_heads, int(number))) is None
