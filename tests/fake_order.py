"""Whether ranks of the fake CUDA made the same calls in one order, and used nothing too early."""

import json
from collections import defaultdict
from itertools import zip_longest

from tests.fake_cuda import NOTES

UNEVEN = {"alltoall", "alltoall_base", "gather", "scatter"}
"""Collectives of which ranks may hand over unequal parts."""


def notes_of(folder):
    """What each rank of a cell noted, by rank."""
    paths = sorted(folder.glob(NOTES.format(rank="*")), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [json.loads(path.read_text()) for path in paths]


def problems(notes):
    """Every fault that a rank noted, and each group's first call that is not the same on all its ranks."""
    own = [f"rank {rank}: {fault}" for rank, each in enumerate(notes) for fault in each["faults"]]
    return [*own, *_out_of_order(notes), *_unpaired(notes)]


def _out_of_order(notes):
    groups = defaultdict(dict)
    for rank, each in enumerate(notes):
        for name, ranks, kind, peer, sizes in each["calls"]:
            made = groups[name, tuple(ranks)].setdefault(rank, [])
            if peer is None:
                made.append((kind, None if kind in UNEVEN else tuple(sizes)))
    for (name, ranks), by_rank in groups.items():
        for number, calls in enumerate(zip_longest(*(by_rank.get(rank, []) for rank in ranks))):
            if len({*calls}) > 1:
                told = ", ".join(f"{each} on rank {rank}" for rank, each in zip(ranks, calls, strict=True))
                yield f"call {number} of group {name} is {told}"
                break


def _unpaired(notes):
    sent, received = defaultdict(list), defaultdict(list)
    for rank, each in enumerate(notes):
        for name, ranks, kind, peer, sizes in each["calls"]:
            if kind == "send":
                sent[name, rank, ranks[peer]].append(sizes)
            elif kind == "recv":
                received[name, ranks[peer], rank].append(sizes)
    for pair in {**sent, **received}:
        if sent[pair] != received[pair]:
            name, source, target = pair
            told = f"which receives {received[pair]}, in group {name}"
            yield f"rank {source} sends {sent[pair]} to rank {target}, {told}"
