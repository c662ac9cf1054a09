"""Checks of the tokens, positions and groups of ranks, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from bench.config import USER_CODE, Cell
from bench.extras.observe.places import document_starts, find_places, layout_shards, order
from bench.extras.observe.tokens import UNKNOWN, LoopReport, ShardTokens
from bench.measure.documents.section import DocumentsSection


def sequence_groups(reports: Sequence[LoopReport]) -> list[list[ShardTokens]]:
    """Return the tokens of all ranks, grouped by the sequence that the ranks share."""
    groups = dict.fromkeys(tuple(report.tokens.group) for report in reports)
    return [[reports[rank].tokens for rank in group] for group in groups]


def group_mistake(reports: Sequence[LoopReport]) -> str | None:
    """Return a message if attention communicates among other ranks than those of its sequence group.

    Nothing is known if attention's collectives run outside of the attention function.
    """
    groups: list[set[int]] = []
    for rank, report in enumerate(reports):
        peers = {rank, *report.attention_peers}
        joined = peers.union(*(group for group in groups if group & peers))
        groups = [joined, *(group for group in groups if not group & joined)]
    for report in reports:
        given = {*report.tokens.group}
        seen = next(group for group in groups if min(given) in group)
        if len(seen) > 1 and seen != given:
            was_given = "no sequence group" if len(given) == 1 else f"the sequence group {ranks_label(given)}"
            return (
                f"attention communicates among ranks {ranks_label(seen)}, but bench.observe was given"
                f" {was_given}, so lengths and checks are not those of the sequences; pass the group of the"
                " ranks that share a sequence: bench.observe(model, sequence_group)"
            )
    return None


def sharding_mistake(shards: Sequence[ShardTokens], *, may_be_documents: bool = False) -> str | None:
    """Return a message if the ranks of one sequence group hold equal tokens or a position twice.

    Documents that begin with shards have equal positions, too; `may_be_documents` is false if attention was
    seen not to stay within them.
    """
    mistake = None
    if len(shards) > 1 and len({(shard.digest, str(shard.positions)) for shard in shards}) == 1:
        mistake = f"all of them were fed the same {shards[0].length:,} tokens; give each rank its own shard"
    elif not may_be_documents or isinstance(places_of(shards), str):
        mistake = _position_mistake(shards)
    return mistake and f"ranks {ranks_label(shards[0].group)} share a sequence, but {mistake}"


def _position_mistake(shards: Sequence[ShardTokens]) -> str | None:
    """Return a message if two ranks hold the same position, and positions grow within every shard."""
    rows = [shard.positions[0] for shard in shards if shard.positions]
    if len(rows) < len(shards) or not all(before < after for row in rows for before, after in pairwise(row)):
        return None
    holders = [(position, rank) for rank, row in zip(shards[0].group, rows, strict=True) for position in row]
    first_rank = dict(reversed(holders))
    for position, rank in holders:
        if first_rank[position] != rank:
            return (
                f"ranks {first_rank[position]} and {rank} both hold position {position}; give each rank the"
                " position_ids of its own shard, without which it counts from 0"
            )
    return None


def why_not_split(groups: Sequence[Sequence[ShardTokens]], *, shows_documents: bool) -> str | None:
    """Return why positions are not seen to be whole sequences, split over ranks; None if they are."""
    if len(groups[0]) == 1:
        return "no ranks share a sequence, and data of a user's loop is not checked"
    for places in map(places_of, groups):
        if isinstance(places, str):
            return places
    reasons = {
        "the model is given whole sequences and takes its shard inside": any(
            shard.digest.startswith(UNKNOWN) for group in groups for shard in group
        ),
        "ranks hold the same tokens at different positions": any(
            len({shard.digest for shard in group}) == 1 for group in groups
        ),
        "positions begin anew with each shard: documents, or not shifted": (
            not shows_documents and any(map(_position_mistake, groups))
        ),
        "positions skip numbers, on purpose or by mistake": any(map(_skips_numbers, groups)),
    }
    return next((text for text, applies in reasons.items() if applies), None)


def _skips_numbers(shards: Sequence[ShardTokens]) -> bool:
    positions = [*chain(*(shard.positions[0] for shard in shards))]
    return max(positions) - min(positions) >= len(positions)


def places_of(shards: Sequence[ShardTokens]) -> list[int] | str:
    """Return the places of a sequence group's tokens, in rank order, or the reason why they are not known."""
    for shard in shards:
        if shard.positions_reason is not None:
            return shard.positions_reason
    if not all(shard.counts_from_zero for shard in shards):
        return "positions are below 0, as for padding, whose mask only the loop knows"
    is_even = len({(shard.batch, shard.length) for shard in shards}) == 1
    places = find_places([shard.positions for shard in shards]) if is_even else None
    return "the positions do not determine the order of the tokens" if places is None else places


def document_starts_of(shards: Sequence[ShardTokens], places: Sequence[int]) -> list[list[int]]:
    """Return the place where each token's document starts, for the whole sequences of a group."""
    rows = zip(*(shard.positions for shard in shards), strict=True)
    return [document_starts(order([*chain(*parts)], places)) for parts in rows]


def packed_documents(cell: Cell, groups: Sequence[Sequence[ShardTokens]]) -> DocumentsSection | None:
    """Return the documents of one micro-step; None if no positions restart, or their order is not known."""
    rows = []
    for group in groups:
        places = places_of(group)
        if isinstance(places, str):
            return None
        starts_of = document_starts_of(group, places)
        rows += [[place - start for place, start in enumerate(starts)] for starts in starts_of]
    section = DocumentsSection.from_positions(rows, cell.grad_accum)
    return section if section.documents[0] > cell.sequences_per_step else None


def find_layout(shards: Sequence[ShardTokens]) -> str:
    """Return the name of the first built-in layout with the positions of some shards; `own` without one."""
    for name, parts in layout_shards(shards[0].seq_len, len(shards[0].group)):
        if all(shard.positions and [*shard.positions[0]] == parts[shard.group_rank] for shard in shards):
            return name
    return USER_CODE


def token_holders(reports: Sequence[LoopReport]) -> list[list[int]]:
    """Return the ranks by the tokens that their sequence groups held in all untimed steps."""
    holders: dict[str, list[int]] = {}
    for group in sequence_groups(reports):
        ranks = group[0].group
        holders.setdefault(str([[*reports[rank].untimed_steps] for rank in ranks]), []).extend(ranks)
    return [*holders.values()]


def equal_tokens_line(reports: Sequence[LoopReport]) -> str | None:
    """Return a line about ranks that trained on the same tokens; None if there are none."""
    equal = [ranks for ranks in token_holders(reports) if len(ranks) > len(reports[0].tokens.group)]
    return (
        f"ranks {'; '.join(map(ranks_label, equal))} held the same tokens in every inspected step, which"
        " count once: tensor or pipeline parallelism, or a sampler that is missing"
        if equal
        else None
    )


def ranks_label(ranks: Sequence[int] | set[int]) -> str:
    """Return text such as `0, 1`."""
    return ", ".join(map(str, sorted(ranks)))
