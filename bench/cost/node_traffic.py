"""What leaves a node in one step: of each message the part whose receivers are on other nodes.

Ranks are neighbours on a node. An all-to-all sends each other rank of its group as much; all else goes round
a ring, from each rank to the next one: so a group's ring leaves each of its nodes once. NCCL may take trees
instead, or let several GPUs of a node share what crosses; that changes which rank sends, and of all-gather
and reduce-scatter not how much has to cross. On gloo a reduce-scatter is an all-reduce, which sends twice as
much (torch's ProcessGroupGloo.cpp, `reduce_scatter_tensor_coalesced`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bench.config import RunConfig
from bench.cost.traffic import ATTENTION, Messages, messages, payload
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts, backwards_per_step
from bench.strategies.schedule import Exchange, Schedule, Stages

SENT_TIMES: Mapping[tuple[str, str], int] = {("gloo", "reduce_scatter"): 2}
"""How often the payload of a kind is sent by a backend whose algorithm is no ring of that kind."""


def node_payload(cell: RunConfig) -> dict[str, int] | None:
    """Bytes that leave in one step the node that most of them leave, by purpose; headers are not counted.

    None on one node, and where no formula is known.
    """
    sent_by_all, facts = payload(cell), STRATEGIES.get(cell.strategy)
    if cell.cluster.nodes == 1 or sent_by_all is None or facts is None:
        return None
    if facts.schedule(cell) is None and sent_by_all[ATTENTION]:
        return None
    attention = _attention_by_rank(cell, facts)
    by_node = (_leaving(cell, node, attention) for node in range(cell.cluster.nodes))
    most = max(by_node, key=Counter.total)
    return {purpose: round(most[purpose]) for purpose in sent_by_all}


def _attention_by_rank(cell: RunConfig, facts: Facts) -> list[list[Messages]]:
    """Of each rank that shares a sequence; where all send the same, of one of them."""
    ranks = cell.sp_degree if facts.sends_unevenly else 1
    return [[*_of_attention(cell, facts, facts.rank_schedule(cell, rank))] for rank in range(ranks)]


def _of_attention(cell: RunConfig, facts: Facts, schedule: Schedule | None) -> Iterator[Messages]:
    if schedule is None:
        return
    times: tuple[tuple[Stages, int], ...] = (
        (schedule.forward, facts.forwards_per_step(cell)),
        (schedule.backward, backwards_per_step(cell)),
    )
    for stages, count in times:
        yield from (
            Messages(ATTENTION, exchange, count)
            for stage in stages
            for exchange in stage.exchanges
            if exchange.ranks > 1
        )


def _leaving(cell: RunConfig, node: int, attention: list[list[Messages]]) -> Counter[str]:
    """Bytes that leave one node, by purpose."""
    here = cell.cluster.ranks_of(node)
    sent: list[tuple[Messages, Sequence[int]]] = [(each, here) for each in messages(cell)]
    for number, messages_of_rank in enumerate(attention):
        alike = [rank for rank in here if rank % len(attention) == number]
        sent += [(each, alike) for each in messages_of_rank]
    left = Counter[str]()
    for each, senders in sent:
        times = SENT_TIMES.get((cell.cluster.backend, each.exchange.kind), 1)
        left[each.purpose] += times * each.count * bytes_leaving(each.exchange, here, senders)
    return left


def bytes_leaving(exchange: Exchange, here: range, senders: Sequence[int] | None = None) -> int:
    """Bytes of one call, in all the groups that have it at once, that the ranks `here` send to others.

    Of the senders among them, if not all of them make it.
    """
    shares = (_share_leaving(exchange, rank, here) for rank in (here if senders is None else senders))
    return round(exchange.sent_bytes * sum(shares))


def _share_leaving(exchange: Exchange, rank: int, here: range) -> float:
    """Of what a rank sends, the part that goes to ranks elsewhere."""
    first = rank - rank % exchange.span + rank % exchange.stride
    group = range(first, first + exchange.span, exchange.stride)
    if exchange.is_even:
        return sum(other not in here for other in group) / (exchange.ranks - 1)
    return float(group[(group.index(rank) + exchange.hops) % exchange.ranks] not in here)
