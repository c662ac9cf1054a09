"""Our DistFlashAttn: contiguous shards; ranks that have no keys left compute for later ranks (2310.03294)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import WIDE_BYTES, Block, Communication, Schedule, Stage, Stages, wide

CHECKPOINTS, LAYER_INPUT, ATTENTION_OUTPUT = "checkpoints", "layer_input", "attention_output"
"""What a checkpointed layer keeps: its input, or attention's output too, which is not computed again then."""


class Lent(Enum):
    """What a rank hands to another to compute with."""

    KEYS = "keys"
    """Keys and values, for the other's own queries."""
    QUERIES = "queries"
    """For the other's own keys: what comes of it is the lender's."""


class Round(NamedTuple):
    """What a rank does with one rank on and one as far back, round the ring."""

    following: int
    """The rank that it lends to, and that gives back what it found."""
    previous: int
    """The rank that lends to it."""
    gives: Lent | None
    takes: Lent | None
    """None in the last round of an even number of ranks, where half of them have nothing to do."""


def rounds(rank: int, ranks: int, *, causal: bool) -> list[Round]:
    """A rank's rounds after that of its own block; all ranks have as many (arXiv:2310.03294, section 3.2).

    Shards are contiguous, so that rank r has r whole blocks of causal attention and half a one, its own.
    After its own it meets two others in each round, each time one further on round the ring. Of two ranks the
    later one needs the earlier one's keys. Where the ring takes these on to it, it computes; where it takes
    the later one's queries on to the earlier one, that one does, and sends back what it found. P/2 rounds are
    enough.
    """
    last = ranks // 2 if causal else ranks - 1
    return [
        Round(
            following=(rank + distance) % ranks,
            previous=(rank - distance) % ranks,
            gives=_lent(rank, distance, ranks, causal=causal),
            takes=_lent((rank - distance) % ranks, distance, ranks, causal=causal),
        )
        for distance in range(1, last + 1)
    ]


def _lent(rank: int, distance: int, ranks: int, *, causal: bool) -> Lent | None:
    """Without a mask every rank needs all keys, and nobody's help."""
    if not causal or rank + distance < ranks:
        return Lent.KEYS
    is_done_by_other = 2 * distance == ranks  # the pair meets twice, and the later rank computes
    return None if is_done_by_other else Lent.QUERIES


class DistFlashAttnFacts(ScheduledFacts):
    name = "distflash_attn"
    style = PlotStyle("#AA4499", "X", "--")
    sends_unevenly = True
    options = {CHECKPOINTS: (LAYER_INPUT, ATTENTION_OUTPUT)}  # noqa: RUF012  a class's own constant

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *_checkpoint_refusals(cell)]

    def balances(self, cell: Cell) -> bool:  # noqa: ARG002
        return True

    def recomputes_attention(self, cell: Cell) -> bool:
        return cell.checkpointing and cell.option(CHECKPOINTS) == LAYER_INPUT

    def checkpointed_bytes(self, cell: Cell) -> int:
        """Attention's output and its LSE, where they are what is kept."""
        return _output_bytes(cell) if cell.option(CHECKPOINTS) == ATTENTION_OUTPUT else 0

    def schedule(self, cell: Cell) -> Schedule:
        """That of the last rank, which computes in every round."""
        return self.rank_schedule(cell, cell.sp_degree - 1)

    def extreme_ranks(self, cell: Cell) -> Collection[int]:
        """Where a rank's rounds of one kind begin or cease: how many it has of each grows evenly between."""
        last, most, least = cell.sp_degree - 1, cell.sp_degree // 2, (cell.sp_degree - 1) // 2
        return {0, least, most, last - most, last - least, last}

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:
        """Keys go to later ranks, queries to earlier ones that help; what is found comes back.

        Forward a helper gives back output and LSE. Backward it is lent the output's gradient, the output and
        the LSE too, and gives back dq; keys come back as their gradients, in their own dtype: each is of one
        block, and added up at home. arXiv:2310.03294, section 3.2 and appendix.
        """
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        q, kv = activation_bytes(cell, heads), activation_bytes(cell, 2 * kv_heads)
        lse = _output_bytes(cell) - q
        forward = Sizes(
            lent={Lent.KEYS: kv, Lent.QUERIES: q},
            given_back={Lent.KEYS: 0, Lent.QUERIES: q + lse},
            merged=wide(cell, q),
        )
        backward = Sizes(
            lent={Lent.KEYS: kv, Lent.QUERIES: 3 * q + lse},
            given_back={Lent.KEYS: kv, Lent.QUERIES: q},
            merged=wide(cell, q + kv),
        )
        return Schedule(_stages(cell, rank, forward), _stages(cell, rank, backward))


def _output_bytes(cell: Cell) -> int:
    """Of one call's output and LSE."""
    rows = cell.batch * cell.model.num_heads * cell.shard_len
    return activation_bytes(cell, cell.model.num_heads) + rows * max(WIDE_BYTES, DTYPE_BYTES[cell.dtype])


def _checkpoint_refusals(cell: Cell) -> list[str]:
    """Where attention's output is kept, layers have to be checkpointed, and what they keep has to stay."""
    chosen = f"strategy.{CHECKPOINTS}={cell.option(CHECKPOINTS)}"
    if cell.option(CHECKPOINTS) == LAYER_INPUT:
        return []
    if not cell.checkpointing:
        way_out = f"take checkpointing=true, or strategy.{CHECKPOINTS}={LAYER_INPUT}"
        return [f"{chosen} says what checkpointed layers keep, and none is checkpointed; {way_out}"]
    if cell.offload.activations:
        way_out = f"take offload.activations=false, or strategy.{CHECKPOINTS}={LAYER_INPUT}"
        return [f"offload.activations=true moves layers' inputs alone, not what {chosen} keeps; {way_out}"]
    return []


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one direction."""

    lent: Mapping[Lent | None, int]
    given_back: Mapping[Lent | None, int]
    """For what was lent."""
    merged: int
    """Of wide tensors that a block's results are taken into."""


def _stages(cell: Cell, rank: int, sizes: Sizes) -> Stages:
    """The rank's own block and one a round, beside what the next round needs and what the last one found."""
    is_causal = cell.workload.mask == "causal"
    heads, kv_heads, tokens = cell.model.num_heads, cell.model.num_kv_heads, cell.shard_len
    own, whole = (Block(cell.batch, heads, kv_heads, tokens, tokens, masked) for masked in (is_causal, False))
    todo = rounds(rank, cell.sp_degree, causal=is_causal)
    blocks = ((own,), *(() if each.takes is None else (whole,) for each in todo), ())

    def sent(size: int) -> tuple[Communication, ...]:
        return (Communication("send", size, cell.sp_degree),) if size else ()

    lent = (*(sent(sizes.lent.get(each.gives, 0)) for each in todo), (), ())
    found = ((), (), *(sent(sizes.given_back.get(each.takes, 0)) for each in todo))
    stages = zip(blocks, lent, found, _held(todo, sizes), strict=True)
    return tuple(
        Stage(block, (*out, *back), is_hidden=bool(block), merged_bytes=sizes.merged, held_bytes=held)
        for block, out, back, held in stages
        if block or out or back
    )


def _held(todo: Sequence[Round], sizes: Sizes) -> Iterator[int]:
    """Bytes beside each block: what it needs and finds, what the next one needs, and what the last one found.

    What others found for this rank in the last round arrives meanwhile.
    """
    at_hand = [0, *(sizes.lent.get(each.takes, 0) for each in todo), 0]
    made = [0, *(sizes.given_back.get(each.takes, 0) for each in todo), 0]
    returned = [0, *(sizes.given_back.get(each.gives, 0) for each in todo), 0]
    for number in range(len(todo) + 2):
        following, before = min(number + 1, len(todo) + 1), max(number - 1, 0)
        yield at_hand[number] + made[number] + at_hand[following] + made[before] + returned[before]
