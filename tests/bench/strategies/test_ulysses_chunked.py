"""Heads are exchanged in rounds: in which order, how many bytes, and which numbers of rounds there can be."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.config import ConfigError
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from bench.strategies.ulysses_chunked import attention
from tests.cells import make_cell

MANY_HEADS = ("model=qwen3_nano", "model.num_heads=16", "model.num_kv_heads=8", "cluster.world_size=2")


def cell_of(*words):
    return make_cell("strategy=ulysses_chunked", "seq_len=256", *MANY_HEADS, *words)


@pytest.fixture
def group():
    """Two ranks, of which one is not there: what arrives is not read."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        (True, "heads 0, heads 1, compute 0, back, heads 2, compute 1, back, compute 2, back"),
        (False, "heads 0, compute 0, back, heads 1, compute 1, back, heads 2, compute 2, back"),
    ],
)
def test_the_next_heads_leave_before_a_round_is_computed_or_after_it(group, monkeypatch, overlap, order):
    events = []

    class Recorded(attention.Channel):
        def start(self, parts):
            super().start(parts)
            events.append("heads" if len(parts) == 3 else "back")

    def compute(number, whole):
        events.append(f"compute {number}")
        return whole[:1]

    monkeypatch.setattr(attention, "Channel", Recorded)
    q, k, v = (torch.zeros(1, heads, 8, 4) for heads in (12, 6, 6))
    attention.Rounds(group, 3, overlap).run((q, k, v), (torch.zeros_like(q),), compute)
    sent = iter(range(3))
    assert ", ".join(f"heads {next(sent)}" if each == "heads" else each for each in events) == order


def test_rounds_take_whole_groups_and_write_each_head_where_it_was(group):
    """Nothing moves between ranks here: both ranks' heads are one's own, so each is found where it was."""
    q = torch.arange(12.0).reshape(1, 12, 1, 1).expand(1, 12, 8, 4).clone()
    rounds = attention.Rounds(group, 3, overlap=True)
    heads = [rounds._heads(q, number)[:, :, 0, 0, 0].tolist() for number in range(3)]
    assert heads == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_the_number_of_rounds_changes_no_byte(overlap):
    facts, plain = STRATEGIES["ulysses_chunked"], STRATEGIES["ulysses"]
    found = {
        facts.exchange_bytes(cell_of(f"strategy.chunks={n}", f"strategy.overlap={overlap}"))
        for n in (1, 2, 4)
    }
    forward = plain.schedule(cell_of()).forward_bytes
    assert found == {3 * forward}  # backward sends what forward did, and its gradients as much again


def test_auto_is_a_kv_head_of_each_rank_in_each_round():
    assert cell_of().option("chunks") == "4"
    assert cell_of("model.num_kv_heads=1").option("chunks") == "1"


def test_what_splits_a_group_of_heads_is_refused_with_the_way_out():
    said = refusal(cell_of("strategy.chunks=3"))
    assert said == (
        "strategy.chunks=3 must divide the KV heads of a rank, 4 at sp_degree=2; choose 1 or 2 or 4, or leave"
        " strategy.chunks=auto"
    )
    assert refusal(cell_of("strategy.chunks=2")) is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("strategy.chunks=0", "strategy.chunks=0: must be a whole number from 1"),
        ("strategy.chunks=many", "strategy.chunks=many: must be a whole number from 1"),
        ("strategy.overlap=2", "strategy.overlap=2: must be true or false"),
    ],
)
def test_an_option_that_is_no_such_number_or_flag_is_refused_in_one_line(word, said):
    with pytest.raises(ConfigError) as refused:
        cell_of(word)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
