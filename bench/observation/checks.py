"""What of somebody's own loop was compared, and what cannot be from outside. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.config import RunConfig
from bench.observation.objective import RankObjective, has_known_scale, not_compared
from bench.observation.tokens import RankTokens, is_packed
from bench.passes import Sections, checks
from bench.passes.facts import NOT_RUN
from bench.record import Check

UNKNOWN: Mapping[str, str] = {
    "losses and gradient norms": "the loop's own are not kept",
    "training signal": "no other computation of this loop is known",
}
"""Why a check is never made of a loop."""
NOT_IN_A_LOOP = "never compared in somebody's own loop"
"""Why any other check is not made whose pass left no section."""
OF_CELLS = frozenset({
    "every gradient on the cell's engine", "every shard of the parameters",
})  # fmt: skip
"""Checks on data or an optimizer of ours, which have no meaning for a loop: `objective` stands for them."""
NEXT_TOKENS = "the mean loss of next tokens"


def checks_of_loop(
    cell: RunConfig,
    sections: Sections,
    groups: Sequence[Sequence[RankTokens]],
    objectives: Sequence[RankObjective],
) -> list[Check]:
    """The passes' checks, with reasons that hold for a loop.

    `groups` say what was fed to the ranks that share a sequence, `objectives` by rank what it trained on.
    """
    found = {check.what: check for check in checks(cell, sections) if check.what not in OF_CELLS}
    for what, check in found.items():
        if check.reason == NOT_RUN:
            found[what] = replace(check, reason=UNKNOWN.get(what, NOT_IN_A_LOOP))
    found["tokens"] = _tokens(cell, groups)
    alone = "there is one rank" if cell.cluster.world_size == 1 else "no two ranks hold the same parameters"
    found.setdefault("replicas", Check(what="replicas", against="one another", reason=alone))
    return [*found.values(), _objective(cell, objectives)]


def forgotten_group(cell: RunConfig, sections: Sections) -> str | None:
    """Why it is wrong that no ranks share a sequence: attention itself exchanges something."""
    engagement = sections.get("engagement")
    sent = 0 if engagement is None else sum(engagement.sent_bytes.get("attention", ()))
    if cell.sp_degree > 1 or sent == 0:
        return None
    return (
        f"attention exchanged {sent:,} bytes between ranks in a step, but no ranks were said to share a"
        " sequence, so nothing of it was compared; hand over the group of those that do:"
        " bench.observe(model, sequence_group)"
    )


def _objective(cell: RunConfig, seen: Sequence[RankObjective]) -> Check:
    """Labels, weights and the value of one step's loss."""
    unknown = not_compared(seen, cell.sp_degree, cell.dtype)
    if unknown is not None:
        return Check(what="objective", against=NEXT_TOKENS, reason=unknown)
    scale = "" if has_known_scale(seen, cell.dtype) else ", gradients but for a factor"
    return Check(what="objective", against=f"{NEXT_TOKENS}{scale}", tokens=cell.seq_len, steps=1)


def _tokens(cell: RunConfig, groups: Sequence[Sequence[RankTokens]]) -> Check:
    """Positions and token ids of the last step that was looked at, where ranks share a sequence."""
    check = Check(what="tokens", against="one whole sequence, dealt out")
    if len(groups[0]) == 1:
        return replace(check, reason="no ranks share a sequence, and the loop's data is its own")
    if any(map(is_packed, groups)):
        return replace(check, reason="positions start anew within a sequence, as in packed documents")
    return replace(check, tokens=cell.seq_len, steps=1)
