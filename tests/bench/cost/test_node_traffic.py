"""What leaves a node, against hand counts and the whole: every message by who sends it to whom."""

from dataclasses import replace

import pytest

from bench.cost.node_traffic import bytes_leaving, node_payload
from bench.cost.traffic import ATTENTION, GRADIENTS, payload
from bench.strategies import STRATEGIES
from bench.strategies.schedule import Exchange
from tests.cells import make_cell, variants

SHARING = {
    (name, options): None
    for name, facts in STRATEGIES.items()
    if facts.shares_sequences
    for _, options in variants(facts)
}


def on_nodes(nodes, *words, ranks=4, backend="nccl"):
    cell = make_cell(*words, f"cluster.world_size={ranks}")
    return replace(cell, cluster=replace(cell.cluster, nodes=nodes, backend=backend))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 2), (16, 2)])
def test_ulysses_and_ring_send_the_head_shards_that_were_counted_on_a_link(query_heads, kv_heads):
    """One node's forward: L(P-L)/P (2N + 2 max(K,P)) shards of a head, and (P-1) 2K of a ring's."""
    ranks, here = 8, 4
    words = ("workload=attention", "model=qwen3_nano", f"model.num_heads={query_heads}", "seq_len=2k")
    words = (*words, f"model.num_kv_heads={kv_heads}", "dtype=fp32")
    for name, shards in {
        "ulysses": here * (ranks - here) / ranks * (2 * query_heads + 2 * max(kv_heads, ranks)),
        "ring": (ranks - 1) * 2 * kv_heads,
    }.items():
        cell = on_nodes(2, *words, f"strategy={name}", ranks=ranks)
        forward = STRATEGIES[name].schedule(cell).forward
        left = sum(bytes_leaving(each, range(here)) for stage in forward for each in stage.exchanges)
        assert left == shards * cell.shard_len * cell.model.head_dim * 4


@pytest.mark.parametrize(("name", "options"), SHARING)
def test_a_rank_on_a_node_of_its_own_sends_all_that_it_hands_over(name, options):
    words = (f"strategy={name}", "seq_len=2k", *(f"strategy.{key}={value}" for key, value in options))
    cell = on_nodes(4, *words)
    assert node_payload(cell) == payload(cell)
    assert node_payload(on_nodes(1, *words)) is None


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_of_usp_the_inner_groups_messages_stay_on_the_node(inner):
    words = ("strategy=usp", "ulysses_degree=2", "seq_len=2k", f"strategy.inner={inner}")
    cell = on_nodes(2, *words)
    kinds = {"ulysses": "send", "ring": "all_to_all"}
    schedule = STRATEGIES["usp"].schedule(cell)
    sent = [each for stage in schedule.forward + schedule.backward for each in stage.exchanges]
    crossing = sum(2 * each.sent_bytes for each in sent if each.kind == kinds[inner])
    assert node_payload(cell)[ATTENTION] == crossing > 0


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_either_rotation_of_torch_leaves_a_node_as_another_ring_does(rotation):
    """One whose gradients make as many hops; those of ours make one less."""
    another, torchs, ours = (
        node_payload(on_nodes(2, *words, "layout=zigzag", "seq_len=2k"))
        for words in (
            ("strategy=ring_flash_attn",),
            ("strategy=torch_cp", f"strategy.rotation={rotation}"),
            ("strategy=ring",),
        )
    )
    assert torchs == another
    assert ours[ATTENTION] < torchs[ATTENTION]


@pytest.mark.parametrize(
    ("exchange", "left"),
    [
        (Exchange("all_to_all", 30, 4), 2 * 20),
        (Exchange("all_to_all", 30, 2, stride=2), 2 * 30),
        (Exchange("all_to_all", 30, 4, to_next=True), 30),
        (Exchange("send", 30, 4), 30),
        (Exchange("send", 30, 2), 0),
        (Exchange("send", 30, 2, stride=2), 2 * 30),
        (Exchange("all_gather", 30, 8), 30),
        (Exchange("all_reduce", 30, 4, stride=2), 2 * 30),
    ],
)
def test_a_message_leaves_where_the_ranks_that_get_it_are_elsewhere(exchange, left):
    """Eight ranks, two a node: these are the second node's."""
    assert bytes_leaving(exchange, range(2, 4)) == left


def test_gloo_all_reduces_where_it_is_asked_to_reduce_and_scatter():
    words = ("strategy=ring", "engine=fsdp2", "seq_len=2k")
    nccl, gloo = (node_payload(on_nodes(2, *words, backend=name)) for name in ("nccl", "gloo"))
    assert gloo == {**nccl, GRADIENTS: 2 * nccl[GRADIENTS]}
