"""Facts of UPipe (arXiv:2602.21196), which is Ulysses in rounds of a few heads to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from bench.config import Cell
from bench.strategies.facts import CallMemory, activation_bytes, lse_bytes, sent_kv_heads
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Schedule, Stage, Stages, whole_block, wide_bytes
from bench.strategies.ulysses.facts import UlyssesFacts, all_to_all_stage


def max_chunks(cell: Cell) -> int:
    """Return the number of rounds in which each takes one query head of every rank, as in the paper.

    It needs least memory. As a round costs a kernel call and two all-to-alls, in forward and again in
    backward, a smaller `strategy.chunks` takes less time on short sequences.
    """
    return max(1, cell.model.num_heads // cell.sp_degree)


@dataclass(frozen=True, slots=True)
class RoundHeads:
    """Heads of one round, summed over ranks."""

    heads: int
    kv_heads: int
    rounds_per_kv: int
    """Number of consecutive rounds with the same KV heads."""

    @classmethod
    def from_cell(cls, cell: Cell) -> RoundHeads:
        chunks, kv_heads = cell.number("chunks"), sent_kv_heads(cell)
        rounds_per_kv = max(1, chunks * cell.ulysses_degree // kv_heads)
        return cls(cell.model.num_heads // chunks, kv_heads * rounds_per_kv // chunks, rounds_per_kv)


class UlyssesChunkedFacts(UlyssesFacts):
    name = "ulysses_chunked"
    style = PlotStyle("#332288", "<")
    saved_copies = (0, 0)
    options = {"chunks": WholeNumber(auto=max_chunks), "overlap": Flag(default=True)}  # noqa: RUF012

    def head_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which the model's numbers of heads or `strategy.chunks` are not legal.

        The query heads that share a KV head are a group. A round must take either whole groups of a rank, or
        query heads of one group only.
        """
        refusals = super().head_refusals(cell)
        if refusals:
            return refusals
        degree, chunks = cell.ulysses_degree, cell.number("chunks")
        heads, kv_heads = cell.model.num_heads // degree, sent_kv_heads(cell) // degree
        legal = [number for number in range(1, heads + 1) if _keeps_groups(number, heads, kv_heads)]
        if chunks in legal:
            return []
        rule = (
            f"must divide the KV heads of a rank ({kv_heads} at sp_degree={degree}), or be a multiple of them"
            f" that divides its query heads ({heads})"
        )
        way_out = f"choose {' or '.join(map(str, legal))}, or leave strategy.chunks=auto"
        return [f"strategy.chunks={chunks} {rule}; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """Return the all-to-alls of `ulysses` in rounds; backward sends Q, K, V and the output once more.

        A KV head may serve several rounds. It is sent with the first of them. Its gradients are summed over
        these rounds in float32 or wider, and sent with the last of them.
        """
        per_round, degree = RoundHeads.from_cell(cell), cell.ulysses_degree
        block = whole_block(cell, per_round.heads // degree, per_round.kv_heads // degree)
        summed_bytes = (
            wide_bytes(cell, activation_bytes(cell, 2 * per_round.kv_heads))
            if per_round.rounds_per_kv > 1
            else 0
        )
        first, last = 0, per_round.rounds_per_kv - 1

        def messages(heads: int, kv_round: int | None) -> list[Stage]:
            """Return each round's all-to-all; K and V go with number `kv_round` of the rounds they serve."""
            return [
                all_to_all_stage(
                    cell, heads + 2 * per_round.kv_heads * (number % per_round.rounds_per_kv == kv_round)
                )
                for number in range(cell.number("chunks"))
            ]

        in_rounds = overlapping_rounds if cell.flag("overlap") else sequential_rounds
        return Schedule(
            forward=in_rounds(
                messages(per_round.heads, first), Stage((block,)), messages(per_round.heads, None)
            ),
            backward=in_rounds(
                messages(3 * per_round.heads, first),
                Stage((block,), merged_bytes=summed_bytes),
                messages(per_round.heads, last),
            ),
        )

    def call_memory(self, cell: Cell) -> CallMemory:
        """Return the memory of the results, and of three copies of the heads that the largest round sends.

        The results are the output and the LSE, in backward the gradients. The copies are the send buffers,
        the receive buffers, and the whole sequences that the kernel takes and returns. On CPU ranks K, V and
        their gradients exist once more, repeated to all query heads. If KV heads serve several rounds, the
        sums of their gradients in float32 or wider are added.
        """
        per_round = RoundHeads.from_cell(cell)
        q, kv = (activation_bytes(cell, heads) for heads in (cell.model.num_heads, sent_kv_heads(cell)))
        round_q, round_kv = (activation_bytes(cell, heads) for heads in (per_round.heads, per_round.kv_heads))
        is_repeated = cell.cluster.device == "cpu" and per_round.kv_heads < per_round.heads
        repeated = 2 * round_q if is_repeated else 0
        sums = wide_bytes(cell, 2 * round_kv) if per_round.rounds_per_kv > 1 else 0
        saved = q + lse_bytes(cell) + (2 * kv if kv > activation_bytes(cell, cell.model.num_kv_heads) else 0)
        return CallMemory(
            forward=saved + 3 * (2 * round_q + 2 * round_kv) + repeated,
            saved=saved,
            backward=q + 2 * kv + 3 * (4 * round_q + 4 * round_kv) + 2 * repeated + sums,
        )


def _keeps_groups(chunks: int, heads: int, kv_heads: int) -> bool:
    """Return whether every round takes whole groups of query heads, or query heads of one group only."""
    return kv_heads % chunks == 0 or (chunks % kv_heads == 0 and heads % chunks == 0)


def sequential_rounds(gathers: Sequence[Stage], work: Stage, scatters: Sequence[Stage]) -> Stages:
    """Return the stages of rounds whose communication does not overlap with computation."""
    pairs = zip(gathers, scatters, strict=True)
    return tuple(stage for gather, scatter in pairs for stage in (gather, work, scatter))


def overlapping_rounds(gathers: Sequence[Stage], work: Stage, scatters: Sequence[Stage]) -> Stages:
    """Return stages that compute a round while the previous results and the next heads are sent."""
    nothing = Stage()
    hidden = zip_longest((nothing, *scatters[:-1]), gathers[1:], fillvalue=nothing)
    return (gathers[0], *(_with_hidden(work, stages) for stages in hidden), scatters[-1])


def _with_hidden(work: Stage, hidden: Sequence[Stage]) -> Stage:
    return replace(
        work,
        communications=tuple(call for stage in hidden for call in stage.communications),
        is_hidden=True,
        packed_bytes=sum(stage.packed_bytes for stage in hidden),
    )
