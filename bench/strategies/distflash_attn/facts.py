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
"""Name and values of the option that decides what a checkpointed layer saves for backward.

With `attention_output` the layer saves attention's output and LSE in addition to its input. Backward then
does not compute attention's forward again.
"""


class Operand(Enum):
    """Operand that a rank sends to another rank for a block of attention."""

    KEYS = "keys"
    """Keys and values, to which the receiver's queries attend."""
    QUERIES = "queries"
    """Queries, which attend to the receiver's keys; the receiver sends back their output."""


class Round(NamedTuple):
    """Partners and operands of this rank in one round.

    The receiver is `distance` ranks further on in the ring, the sender `distance` ranks back. An operand is
    None in the last round of an even number of ranks, in which half of the ranks send and the other half
    compute.
    """

    receiver: int
    """Rank that receives this rank's operand and sends back the result."""
    sender: int
    """Rank that sends its operand to this rank and receives the result."""
    sends: Operand | None
    """Operand that this rank sends."""
    receives: Operand | None
    """Operand that this rank receives and computes with."""


def rounds(rank: int, ranks: int, *, causal: bool) -> list[Round]:
    """Return the rounds of a rank after the block of its local keys (arXiv:2310.03294, section 3.2).

    Shards are contiguous. Under the causal mask rank r therefore needs r full blocks, of its queries and the
    keys of each earlier rank, and the triangle of its local keys. In round d every rank sends an operand to
    the rank d further on in the ring, which computes the block. To a later rank it sends its keys. If the
    receiver lies beyond the end of the ring and so is an earlier rank, it sends its queries, and the receiver
    sends back the result. After P/2 rounds, rounded down, all blocks are computed.

    Without the mask every rank sends its keys to all others, in P-1 rounds.
    """
    last_distance = ranks // 2 if causal else ranks - 1
    return [
        Round(
            receiver=(rank + distance) % ranks,
            sender=(rank - distance) % ranks,
            sends=_operand_to_send(rank, distance, ranks, causal=causal),
            receives=_operand_to_send((rank - distance) % ranks, distance, ranks, causal=causal),
        )
        for distance in range(1, last_distance + 1)
    ]


def _operand_to_send(rank: int, distance: int, ranks: int, *, causal: bool) -> Operand | None:
    """Return the operand that a rank sends to the rank `distance` further on, or None if it sends none.

    Without the causal mask it always sends its keys.
    """
    if not causal or rank + distance < ranks:
        return Operand.KEYS
    # Half-way round the ring the receiver is also the sender, and already sends the keys of their one block.
    is_same_partner = 2 * distance == ranks
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
        """Return the first, middle and last ranks.

        Between them, the numbers of rounds in which a rank sends keys, sends queries or is idle change
        linearly, so that the largest sum of bytes is at one of them.
        """
        last = cell.sp_degree - 1
        halves = {cell.sp_degree // 2, last // 2}
        return {0, last, *halves, *(last - half for half in halves)}

    def rank_schedule(self, cell: Cell, rank: int) -> Schedule:
        """Return the stages of one attention call on `rank`.

        In each round the rank sends K and V to a later rank or queries to an earlier one. Forward: the
        receiver of queries sends back their output and LSE. Backward: with the queries go the output, its
        gradient and the LSE, and the receiver sends back dq; the receiver of K and V sends back dk and dv.
        These gradients of one block have the cell's dtype, and their owner sums them. Source:
        arXiv:2310.03294, section 3.2 and appendix.
        """
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        q, kv = activation_bytes(cell, heads), activation_bytes(cell, 2 * kv_heads)
        lse = _output_bytes(cell) - q
        forward = RoundBytes(
            operands={Operand.KEYS: kv, Operand.QUERIES: q},
            results={Operand.KEYS: 0, Operand.QUERIES: q + lse},
            merged=wide_bytes(cell, q),
        )
        backward = RoundBytes(
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
class RoundBytes:
    """Sizes in bytes of the tensors of one round, in forward or in backward."""

    operands: Mapping[Operand | None, int]
    """Bytes of the tensors that are sent with each kind of operand."""
    results: Mapping[Operand | None, int]
    """Bytes that the receiver of each kind of operand sends back."""
    merged: int
    """Bytes of the wide tensors to which the results of a block are added."""


def _stages(cell: Cell, rank: int, sizes: RoundBytes) -> Stages:
    """Return the stages of the local block, of every round and of the last result.

    The stage of a round also sends the operand of the next round and the result of the previous one. Stages
    in which the rank neither computes nor sends are left out.
    """
    is_causal = cell.workload.mask == "causal"
    heads, kv_heads, tokens = cell.model.num_heads, cell.model.num_kv_heads, cell.shard_len
    local, full = (
        Block(cell.batch, heads, kv_heads, tokens, tokens, masked) for masked in (is_causal, False)
    )
    all_rounds = rounds(rank, cell.sp_degree, causal=is_causal)
    blocks = ((local,), *(() if round_.receives is None else (full,) for round_ in all_rounds), ())

    def send(size: int) -> tuple[Communication, ...]:
        return (Communication("send", size, cell.sp_degree),) if size else ()

    operands = (*(send(sizes.operands.get(round_.sends, 0)) for round_ in all_rounds), (), ())
    results = ((), (), *(send(sizes.results.get(round_.receives, 0)) for round_ in all_rounds))
    stages = zip(blocks, operands, results, _buffer_bytes(all_rounds, sizes), strict=True)
    return tuple(
        Stage(
            block, (*operand, *result), is_hidden=bool(block), merged_bytes=sizes.merged, buffer_bytes=buffers
        )
        for block, operand, result, buffers in stages
        if block or operand or result
    )


def _buffer_bytes(all_rounds: Sequence[Round], sizes: RoundBytes) -> Iterator[int]:
    """Yield the bytes of communication buffers in each of the stages, before empty stages are left out.

    They hold the operand and the result of the stage's block, the arriving operand of the next round, and two
    results of the previous round: the one that this rank sends back, and the one that it receives.
    """
    operands = [0, *(sizes.operands.get(round_.receives, 0) for round_ in all_rounds), 0]
    results = [0, *(sizes.results.get(round_.receives, 0) for round_ in all_rounds), 0]
    received = [0, *(sizes.results.get(round_.sends, 0) for round_ in all_rounds), 0]
    for stage in range(len(all_rounds) + 2):
        following, previous = min(stage + 1, len(all_rounds) + 1), max(stage - 1, 0)
        yield operands[stage] + results[stage] + operands[following] + results[previous] + received[previous]
