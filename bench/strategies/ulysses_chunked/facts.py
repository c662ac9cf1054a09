"""Our Ulysses in rounds of a few heads, UPipe (arXiv:2602.21196): copies of one round are held at a time."""

from __future__ import annotations

from bench.config import ModelConfig, RunConfig
from bench.strategies.facts import CallMemory, activation_bytes, exchanged_kv_heads, lse_bytes, repeats_kv
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.schedule import Block, Schedule, Stage, Stages, whole_block
from bench.strategies.ulysses.facts import Ulysses, exchange_heads


def most_chunks(sp_degree: int, model: ModelConfig) -> int:
    """A KV head of each rank in each round, as the paper has it: the least memory."""
    return max(1, model.num_kv_heads // sp_degree)


class UlyssesChunked(Ulysses):
    name = "ulysses_chunked"
    kept_copies = (0, 0)
    options = {"chunks": WholeNumber(auto=most_chunks), "overlap": Flag(default=True)}  # noqa: RUF012

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "ulysses"

    def head_refusals(self, cell: RunConfig) -> list[str]:
        """A round takes whole groups of query heads, with their KV heads."""
        refusals = super().head_refusals(cell)
        chunks, kv_heads = cell.number("chunks"), exchanged_kv_heads(cell) // cell.ulysses_degree
        if refusals or kv_heads % chunks == 0:
            return refusals
        divisors = " or ".join(str(each) for each in range(1, kv_heads + 1) if kv_heads % each == 0)
        rule = f"must divide the KV heads of a rank, {kv_heads} at sp_degree={cell.ulysses_degree}"
        return [f"strategy.chunks={chunks} {rule}; choose {divisors}, or leave strategy.chunks=auto"]

    def schedule(self, cell: RunConfig) -> Schedule:
        """The bytes of `ulysses`, but that backward exchanges Q, K, V and the output once more."""
        chunks = cell.number("chunks")
        heads, kv_heads = cell.model.num_heads // chunks, exchanged_kv_heads(cell) // chunks
        block = whole_block(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree)
        qkv, out = exchange_heads(cell, heads + 2 * kv_heads), exchange_heads(cell, heads)
        dout_out_qkv = exchange_heads(cell, 3 * heads + 2 * kv_heads)
        in_rounds = overlapped if cell.flag("overlap") else in_turn
        return Schedule(
            forward=in_rounds(qkv, block, out, chunks), backward=in_rounds(dout_out_qkv, block, qkv, chunks)
        )

    def call_memory(self, cell: RunConfig) -> CallMemory:
        """Beside the output or gradients three times what one round exchanges, there and back.

        Once as it leaves, once as it arrives, and once in order as the kernel takes and returns it; a CPU's
        kernels take K and V, and return their gradients, as often as there are query heads.
        """
        chunks, kv_heads = cell.number("chunks"), exchanged_kv_heads(cell)
        q, kv = activation_bytes(cell, cell.model.num_heads), activation_bytes(cell, kv_heads)
        repeated = 2 * q // chunks if repeats_kv(cell) else 0
        kept = q + lse_bytes(cell) + (2 * kv if kv_heads > cell.model.num_kv_heads else 0)
        return CallMemory(
            forward=kept + 3 * (2 * q + 2 * kv) // chunks + repeated,
            kept=kept,
            backward=q + 2 * kv + 3 * (4 * q + 4 * kv) // chunks + 2 * repeated,
        )


def in_turn(there: Stage, block: Block, back: Stage, chunks: int) -> Stages:
    """One round after another."""
    return (there, Stage((block,)), back) * chunks


def overlapped(there: Stage, block: Block, back: Stage, chunks: int) -> Stages:
    """Behind each block the next one's heads and the results of the last one."""
    beside = [
        [*((there,) if number < chunks - 1 else ()), *((back,) if number else ())] for number in range(chunks)
    ]
    blocks = tuple(
        Stage(
            (block,),
            tuple(exchange for stage in stages for exchange in stage.exchanges),
            is_hidden=True,
            packed_bytes=sum(stage.packed_bytes for stage in stages),
        )
        for stages in beside
    )
    return (there, *blocks, back)
