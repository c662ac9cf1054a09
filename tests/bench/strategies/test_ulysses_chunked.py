"""Heads are exchanged in rounds: in which order, how many bytes, and which numbers of rounds there can be."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.strategies.facts import activation_bytes
from bench.strategies.schedule import wide
from bench.strategies.ulysses_chunked import rounds
from tests.support.cells import make_cell

MANY_HEADS = ("model=qwen3_nano", "model.num_heads=16", "model.num_kv_heads=8", "cluster.world_size=2")


@cache
def plain_cell():
    """Composed once: that takes long."""
    return make_cell("strategy=ulysses_chunked", "seq_len=256", *MANY_HEADS)


def cell_with(heads, kv_heads, chunks, overlap="true"):
    """The same with other heads and rounds."""
    cell = plain_cell()
    options = (("chunks", str(chunks)), ("overlap", overlap))
    return replace(cell, model=replace(cell.model, num_heads=heads, num_kv_heads=kv_heads), options=options)


@pytest.fixture
def group():
    """Two ranks, of which one is not there: what arrives is not read."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """One rank, to which all arrives that it sends."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def heads_of(number, dtype=torch.float32):
    """So many heads of eight tokens, each filled with its own number."""
    return torch.arange(number, dtype=dtype).reshape(1, -1, 1, 1).expand(1, -1, 8, 4).clone()


@pytest.fixture
def events(monkeypatch):
    """What left, as the heads of each tensor and where to, and what was computed."""
    events, channels = [], []

    class Recorded(rounds.Channel):
        def __init__(self, *given):
            super().__init__(*given)
            channels.append(self)

        def start(self, parts):
            super().start(parts)
            where = ("there", "back")[channels.index(self) % 2]
            events.append(f"{'+'.join(str(part.shape[1]) for part in parts)} {where}")

    monkeypatch.setattr(rounds, "Channel", Recorded)
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
def test_the_next_heads_leave_before_a_round_is_computed_or_after_it(group, events, kv_heads, overlap, order):
    """K and V leave once, with the first round that they serve; their gradients once, with the last."""

    def compute(number, whole):
        events.append(str(number))
        return [x.clone() for x in whole]

    given = [torch.zeros(1, heads, 8, 4) for heads in (12, kv_heads, kv_heads)]
    rounds.Rounds(group, 3, overlap).run(given, [x.clone() for x in given], compute)
    assert ", ".join(events) == order


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [16, 4, 2])
def test_what_leaves_is_what_the_schedule_says(group, events, kv_heads, chunks, overlap):
    """Message by message, forward and backward."""
    cell = cell_with(16, kv_heads, chunks, overlap)
    q, k, v = (torch.zeros(1, heads, 8, 4) for heads in (16, kv_heads, kv_heads))
    in_rounds = rounds.Rounds(group, chunks, overlap == "true")
    in_rounds.run((q, k, v), (q,), lambda _, whole: whole[:1])
    in_rounds.run((q, q, k, v, q), (q, k, v), lambda _, whole: [x.clone() for x in whole[1:4]])
    said = STRATEGIES["ulysses_chunked"].schedule(cell)
    a_head = activation_bytes(cell, cell.sp_degree) * (cell.sp_degree - 1) // cell.sp_degree
    assert [sum(map(int, event.split()[0].split("+"))) for event in events] == [
        exchange.sent_bytes // a_head
        for stage in (*said.forward, *said.backward)
        for exchange in stage.communications
    ]


LOST_IF_NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-30}
"""What one and this come to is one: in the dtype itself, or in float32 for float64."""


@pytest.mark.parametrize("dtype", LOST_IF_NARROW)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_a_kv_head_are_added_wide_over_its_rounds(alone, overlap, dtype):
    share = LOST_IF_NARROW[dtype]

    def compute(number, whole):
        """Of the first round of a group one, of the others too little to be seen beside it."""
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
def test_rounds_compute_what_ulysses_computes_and_add_up_what_they_share(kv_heads, chunks, of_a_round, added):
    """Beside each kernel call of those that share a KV head its two gradients are added, wide."""
    cell = cell_with(16, kv_heads, chunks)
    (whole,) = blocks_of(STRATEGIES["ulysses"].schedule(cell).forward)
    said = STRATEGIES["ulysses_chunked"].schedule(cell)
    for blocks in (blocks_of(said.forward), blocks_of(said.backward)):
        assert [(block.heads, block.kv_heads) for block in blocks] == [of_a_round] * chunks
        assert sum(block.area for block in blocks) == whole.area
    a_gradient = wide(cell, activation_bytes(cell, cell.sp_degree))
    merged = [stage.merged_bytes for stage in said.backward if stage.blocks]
    assert merged == [added * a_gradient] * chunks
    assert not any(stage.merged_bytes for stage in said.forward)


def blocks_of(stages):
    return [block for stage in stages for block in stage.blocks]


def test_auto_is_a_query_head_of_each_rank_in_each_round():
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
def test_what_splits_a_group_of_heads_is_refused_with_the_way_out(kv_heads, of_a_rank, chunks, legal):
    heads = 24 if "3" in legal else 16
    assert refusal(cell_with(heads, kv_heads, chunks)) == (
        f"strategy.chunks={chunks} must divide the KV heads of a rank, {of_a_rank} at sp_degree=2, or be a"
        f" multiple of them that divides its query heads, {heads // 2}; choose {legal}, or leave"
        " strategy.chunks=auto"
    )
    for number in legal.split(" or "):
        assert refusal(cell_with(heads, kv_heads, int(number))) is None
