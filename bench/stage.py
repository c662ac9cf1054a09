"""What a cell's first rank tells when it begins something: the pass, and the full-length steps it will run.

It tells before the steps, never between them. Timed steps run back to back: on a GPU a step is launched
long before it is done, so that only waiting for it, which would change what is timed, could tell that it
is. Whoever listens counts steps by the clock and says "about".
"""

from __future__ import annotations

from dataclasses import dataclass

TRACED_STEPS = 3
"""One is kept: a single step of a few milliseconds says little on a machine with neighbours."""


FIRST_STEP, WARM_UP = "first step", "warm-up"
"""Parts of timing. The first full-length step is a warm-up, or where the budget has room for no other the
timed one; `warm-up` are those after it. What counts has no part."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pass or, with `part`, something within it; `steps` full-length steps, or something else with 0.

    `step_s` is what a full-length step took, in seconds; None where none has been timed yet.
    """

    pass_name: str
    part: str | None = None
    steps: int = 0
    step_s: float | None = None
