"""What of somebody's own loop was compared, and what cannot be from outside. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.config import RunConfig
from bench.observation.tokens import RankTokens, is_packed
from bench.passes import Sections, checks
from bench.passes.facts import NOT_RUN
from bench.record import Check

UNKNOWN: Mapping[str, str] = {
    "objective of a two-layer cut": "the loss is the loop's own, and so is who divides it by what",
    "every gradient on the cell's engine": "the loop's weights and data are its own",
    "every shard of the parameters": "the loop's optimizer is its own",
    "losses and gradient norms": "the loop's losses are not seen",
    "training signal": "the loop's losses are not seen",
}
"""Why a check is never made of a loop."""
NOT_IN_A_LOOP = "never compared in somebody's own loop"
"""The same of all other checks whose pass has no section."""


def checks_of_loop(
    cell: RunConfig, sections: Sections, groups: Sequence[Sequence[RankTokens]]
) -> list[Check]:
    """The passes' checks, with reasons that hold for a loop.

    `groups` say what was fed to the ranks that share a sequence.
    """
    tokens = _tokens(cell, groups)
    return [tokens if each.what == tokens.what else _told(each) for each in checks(cell, sections)]


def _told(check: Check) -> Check:
    if check.reason != NOT_RUN:
        return check
    return replace(check, reason=UNKNOWN.get(check.what, NOT_IN_A_LOOP))


def _tokens(cell: RunConfig, groups: Sequence[Sequence[RankTokens]]) -> Check:
    """Positions and token ids of the last step that was looked at, where ranks share a sequence."""
    check = Check(what="tokens", against="one whole sequence, dealt out")
    if len(groups[0]) == 1:
        return replace(check, reason="no ranks share a sequence, and the loop's data is its own")
    if any(map(is_packed, groups)):
        return replace(check, reason="positions start anew within a sequence, as in packed documents")
    return replace(check, tokens=cell.seq_len, steps=1)
