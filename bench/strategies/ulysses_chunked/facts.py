"""Our Ulysses in rounds of a few heads, UPipe (arXiv:2602.21196): copies of one round are held at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from bench.config import Cell
from bench.strategies.facts import CallMemory, activation_bytes, exchanged_kv_heads, lse_bytes
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Schedule, Stage, Stages, whole_block, wide
from bench.strategies.ulysses.facts import UlyssesFacts, exchange_heads


def most_chunks(cell: Cell) -> int:
    """A query head of each rank in each round, as the paper has it: the least memory.

    A round costs a kernel call and two all-to-alls, forward and backward alike, which shows at short lengths:
    `strategy.chunks` trades that against memory.
    """
    return max(1, cell.model.num_heads // cell.sp_degree)


@dataclass(frozen=True, slots=True)
class RoundHeads:
    """Heads that all ranks together take in one round; the same KV heads serve `rounds_of_kv` of them."""

    heads: int
    kv_heads: int
    rounds_of_kv: int

    @classmethod
    def of(cls, cell: Cell) -> RoundHeads:
        chunks, kv_heads = cell.number("chunks"), exchanged_kv_heads(cell)
        rounds_of_kv = max(1, chunks * cell.ulysses_degree // kv_heads)
        return cls(cell.model.num_heads // chunks, kv_heads * rounds_of_kv // chunks, rounds_of_kv)


class UlyssesChunkedFacts(UlyssesFacts):
    name = "ulysses_chunked"
    style = PlotStyle("#332288", "<")
    kept_copies = (0, 0)
    options = {"chunks": WholeNumber(auto=most_chunks), "overlap": Flag(default=True)}  # noqa: RUF012

    def head_refusals(self, cell: Cell) -> list[str]:
        """A round takes whole groups of query heads with their KV heads, or stays within one group a rank."""
        refusals = super().head_refusals(cell)
        if refusals:
            return refusals
        degree, chunks = cell.ulysses_degree, cell.number("chunks")
        heads, kv_heads = cell.model.num_heads // degree, exchanged_kv_heads(cell) // degree
        legal = [each for each in range(1, heads + 1) if _keeps_groups(each, heads, kv_heads)]
        if chunks in legal:
            return []
        rule = (
            f"must divide the KV heads of a rank, {kv_heads} at sp_degree={degree}, or be a multiple of them"
            f" that divides its query heads, {heads}"
        )
        way_out = f"choose {' or '.join(map(str, legal))}, or leave strategy.chunks=auto"
        return [f"strategy.chunks={chunks} {rule}; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """The bytes of `ulysses`, but that backward exchanges Q, K, V and the output once more.

        K and V are exchanged once, whatever the rounds: they travel with the first that they serve, their
        gradients, added up in float32 at least, with the last.
        """
        each, degree = RoundHeads.of(cell), cell.ulysses_degree
        block = whole_block(cell, each.heads // degree, each.kv_heads // degree)
        added = wide(cell, activation_bytes(cell, 2 * each.kv_heads)) if each.rounds_of_kv > 1 else 0
        first, last = 0, each.rounds_of_kv - 1

        def messages(heads: int, kv_with: int | None) -> list[Stage]:
            """Round by round; K and V, or their gradients, with this one of those that they serve."""
            return [
                exchange_heads(cell, heads + 2 * each.kv_heads * (number % each.rounds_of_kv == kv_with))
                for number in range(cell.number("chunks"))
            ]

        in_rounds = overlapped if cell.flag("overlap") else in_turn
        return Schedule(
            forward=in_rounds(messages(each.heads, first), Stage((block,)), messages(each.heads, None)),
            backward=in_rounds(
                messages(3 * each.heads, first),
                Stage((block,), merged_bytes=added),
                messages(each.heads, last),
            ),
        )

    def call_memory(self, cell: Cell) -> CallMemory:
        """Beside the output or gradients three times what the fullest round exchanges, there and back.

        Once as it leaves, once as it arrives, and once in order as the kernel takes and returns it; a CPU's
        kernels take K and V, and return their gradients, as often as the round has query heads. Where K and V
        serve several rounds, the sums of their gradients are there as well, wide.
        """
        each = RoundHeads.of(cell)
        q, kv = (activation_bytes(cell, heads) for heads in (cell.model.num_heads, exchanged_kv_heads(cell)))
        round_q, round_kv = (activation_bytes(cell, heads) for heads in (each.heads, each.kv_heads))
        is_repeated = cell.cluster.device == "cpu" and each.kv_heads < each.heads
        repeated = 2 * round_q if is_repeated else 0
        sums = wide(cell, 2 * round_kv) if each.rounds_of_kv > 1 else 0
        kept = q + lse_bytes(cell) + (2 * kv if kv > activation_bytes(cell, cell.model.num_kv_heads) else 0)
        return CallMemory(
            forward=kept + 3 * (2 * round_q + 2 * round_kv) + repeated,
            kept=kept,
            backward=q + 2 * kv + 3 * (4 * round_q + 4 * round_kv) + 2 * repeated + sums,
        )


def _keeps_groups(chunks: int, heads: int, kv_heads: int) -> bool:
    """Whether no round takes parts of two groups of query heads, of those of a rank."""
    return kv_heads % chunks == 0 or (chunks % kv_heads == 0 and heads % chunks == 0)


def in_turn(there: Sequence[Stage], work: Stage, back: Sequence[Stage]) -> Stages:
    """One round after another."""
    return tuple(stage for each in zip(there, back, strict=True) for stage in (each[0], work, each[1]))


def overlapped(there: Sequence[Stage], work: Stage, back: Sequence[Stage]) -> Stages:
    """Behind each block the results of the last one and the next one's heads."""
    nothing = Stage()
    beside = zip_longest((nothing, *back[:-1]), there[1:], fillvalue=nothing)
    return (there[0], *(_hidden(work, stages) for stages in beside), back[-1])


def _hidden(work: Stage, beside: Sequence[Stage]) -> Stage:
    return replace(
        work,
        communications=tuple(exchange for stage in beside for exchange in stage.communications),
        is_hidden=True,
        packed_bytes=sum(stage.packed_bytes for stage in beside),
    )
