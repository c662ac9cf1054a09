"""Facts of the built-in DistFlashAttn (arXiv:2310.03294), where idle ranks compute blocks of later ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import (
    WIDE_NUMBER_BYTES,
    Block,
    Communication,
    Schedule,
    Stage,
    Stages,
    wide_bytes,
)

CHECKPOINTS, LAYER_INPUT, ATTENTION_OUTPUT = "checkpoints", "layer_input", "attention_output"
"""Name and values of the option that decides what a checkpointed layer saves.

With `attention_output` a layer saves attention's output in addition to its input, and does not recompute
attention.
"""


class Operand(Enum):
    """Operand that a rank sends to another rank for a block of attention."""

    KEYS = "keys"
    """Keys and values, which the receiver combines with its queries."""
    QUERIES = "queries"
    """Queries, which the receiver combines with its keys; it returns the result to the sender."""


class Round(NamedTuple):
    """Partners and operands of a rank in one round; both partners have the same distance round the ring."""

    following: int
    """Rank that receives this rank's operand, and returns the result."""
    previous: int
    """Rank that sends its operand to this rank."""
    sends: Operand | None
    """Operand that this rank sends."""
    receives: Operand | None
    """Operand that this rank receives.

    It is None, as `sends` may be, in the last round of an even number of ranks, where half of them are idle.
    """


def rounds(rank: int, ranks: int, *, causal: bool) -> list[Round]:
    """Return the rounds of a rank after the block of its local keys (arXiv:2310.03294, section 3.2).

    All ranks have the same number of rounds. As shards are contiguous, rank r has r full blocks of causal
    attention and the triangle of its local keys. In round d it has two partners, d ranks on and d ranks back
    in the ring. Of two partners the later rank needs the earlier one's keys. If the earlier rank sends its
    keys, the later rank computes the block. If the later rank sends its queries round the end of the ring,
    the earlier rank computes the block and returns the result. P/2 rounds suffice.

    Args:
        rank: Number of the rank in the ring.
        ranks: Number of ranks of the ring.
        causal: Whether the causal mask applies; without it every rank needs P-1 rounds.
    """
    last = ranks // 2 if causal else ranks - 1
    return [
        Round(
            following=(rank + distance) % ranks,
            previous=(rank - distance) % ranks,
            sends=_operand_to_send(rank, distance, ranks, causal=causal),
            receives=_operand_to_send((rank - distance) % ranks, distance, ranks, causal=causal),
        )
        for distance in range(1, last + 1)
    ]


def _operand_to_send(rank: int, distance: int, ranks: int, *, causal: bool) -> Operand | None:
    """Return the operand that a rank sends to the rank `distance` further on.

    Without a mask every rank needs all keys and computes all of its blocks.
    """
    if not causal or rank + distance < ranks:
        return Operand.KEYS
    is_same_partner = 2 * distance == ranks  # of the two partners the later rank computes
    return None if is_same_partner else Operand.QUERIES


class DistFlashAttnFacts(ScheduledFacts):
    name = "distflash_attn"
    style = PlotStyle("#AA4499", "X", "--")
    sends_unevenly = True
    options = {CHECKPOINTS: (LAYER_INPUT, ATTENTION_OUTPUT)}  # noqa: RUF012  constant

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *_checkpoint_refusals(cell)]

    def balances_causal_area(self, cell: Cell) -> bool:  # noqa: ARG002
        return True

    def recomputes_attention(self, cell: Cell) -> bool:
        return cell.checkpointing and cell.option(CHECKPOINTS) == LAYER_INPUT

    def checkpointed_bytes(self, cell: Cell) -> int:
        """Return the bytes of attention's output and LSE if checkpointed layers save them."""
        return _output_bytes(cell) if cell.option(CHECKPOINTS) == ATTENTION_OUTPUT else 0

    def schedule(self, cell: Cell) -> Schedule:
        """Return the stages of the last rank, which computes in every round."""
        return self.rank_schedule(cell, cell.sp_degree - 1)

    def extreme_ranks(self, cell: Cell) -> Collection[int]:
        """Return the ranks where a kind of round first or last occurs.

        The numbers of rounds in which a rank sends keys, sends queries or is idle change evenly between them.
        """
        last, most, least = cell.sp_degree - 1, cell.sp_degree // 2, (cell.sp_degree - 1) // 2
        return {0, least, most, last - most, last - least, last}

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:
        """Return stages that send keys to later ranks or queries to earlier ones, and return the results.

        In forward the receiver of queries returns output and LSE. In backward it also receives the output's
        gradient, the output and the LSE, and returns dq; the receiver of keys returns their gradients.
        Returned gradients have the cell's dtype, as they belong to one block, and are summed by their owner.
        Source: arXiv:2310.03294, section 3.2 and appendix.
        """
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        q, kv = activation_bytes(cell, heads), activation_bytes(cell, 2 * kv_heads)
        lse = _output_bytes(cell) - q
        forward = DirectionBytes(
            operands={Operand.KEYS: kv, Operand.QUERIES: q},
            results={Operand.KEYS: 0, Operand.QUERIES: q + lse},
            merged=wide_bytes(cell, q),
        )
        backward = DirectionBytes(
            operands={Operand.KEYS: kv, Operand.QUERIES: 3 * q + lse},
            results={Operand.KEYS: kv, Operand.QUERIES: q},
            merged=wide_bytes(cell, q + kv),
        )
        return Schedule(_stages(cell, rank, forward), _stages(cell, rank, backward))


def _output_bytes(cell: Cell) -> int:
    """Return the bytes of the output and the LSE of one call."""
    rows = cell.batch * cell.model.num_heads * cell.shard_len
    return activation_bytes(cell, cell.model.num_heads) + rows * max(
        WIDE_NUMBER_BYTES, DTYPE_BYTES[cell.dtype]
    )


def _checkpoint_refusals(cell: Cell) -> list[str]:
    """Return the reasons for which checkpointed layers cannot save attention's output."""
    chosen = f"strategy.{CHECKPOINTS}={cell.option(CHECKPOINTS)}"
    if cell.option(CHECKPOINTS) == LAYER_INPUT:
        return []
    if not cell.checkpointing:
        way_out = f"take checkpointing=true, or strategy.{CHECKPOINTS}={LAYER_INPUT}"
        return [f"{chosen} is for checkpointed layers, and no layer is checkpointed; {way_out}"]
    if cell.offload.activations:
        way_out = f"take offload.activations=false, or strategy.{CHECKPOINTS}={LAYER_INPUT}"
        return [f"offload.activations=true moves only layers' inputs, and {chosen} saves more; {way_out}"]
    return []


@dataclass(frozen=True, slots=True)
class DirectionBytes:
    """Bytes that a rank sends in forward or in backward."""

    operands: Mapping[Operand | None, int]
    results: Mapping[Operand | None, int]
    """Bytes that the receiver of an operand returns."""
    merged: int
    """Bytes of the wide tensors to which the results of a block are added."""


def _stages(cell: Cell, rank: int, sizes: DirectionBytes) -> Stages:
    """Return the stage of the local block and of every round.

    A stage also sends the operand of the next round and the result of the previous one.
    """
    is_causal = cell.workload.mask == "causal"
    heads, kv_heads, tokens = cell.model.num_heads, cell.model.num_kv_heads, cell.shard_len
    own, whole = (Block(cell.batch, heads, kv_heads, tokens, tokens, masked) for masked in (is_causal, False))
    all_rounds = rounds(rank, cell.sp_degree, causal=is_causal)
    blocks = ((own,), *(() if round_.receives is None else (whole,) for round_ in all_rounds), ())

    def sent(size: int) -> tuple[Communication, ...]:
        return (Communication("send", size, cell.sp_degree),) if size else ()

    operands = (*(sent(sizes.operands.get(round_.sends, 0)) for round_ in all_rounds), (), ())
    results = ((), (), *(sent(sizes.results.get(round_.receives, 0)) for round_ in all_rounds))
    stages = zip(blocks, operands, results, _buffer_bytes(all_rounds, sizes), strict=True)
    return tuple(
        Stage(
            block, (*operand, *result), is_hidden=bool(block), merged_bytes=sizes.merged, buffer_bytes=buffers
        )
        for block, operand, result, buffers in stages
        if block or operand or result
    )


def _buffer_bytes(all_rounds: Sequence[Round], sizes: DirectionBytes) -> Iterator[int]:
    """Yield the bytes of communication buffers while a block is computed.

    They are the operand and the result of the block, the operand of the next round, the result of the
    previous round, and the result that another rank returns for this rank's operand of the previous round.
    """
    operands = [0, *(sizes.operands.get(round_.receives, 0) for round_ in all_rounds), 0]
    results = [0, *(sizes.results.get(round_.receives, 0) for round_ in all_rounds), 0]
    returned = [0, *(sizes.results.get(round_.sends, 0) for round_ in all_rounds), 0]
    for number in range(len(all_rounds) + 2):
        following, before = min(number + 1, len(all_rounds) + 1), max(number - 1, 0)
        yield operands[number] + results[number] + operands[following] + results[before] + returned[before]
