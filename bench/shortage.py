"""An allocation that failed, in a reader's words."""

from __future__ import annotations

from bench.record import OutOfMemory
from bench.words import size_label


def shortage(found: OutOfMemory, said: str) -> str:
    """`no room for 2.0 GiB more of device memory, with 70.1 GiB held`.

    What the error `said` stands for the first half where it gives no size.
    """
    if found.requested_bytes is None:
        what = said.strip().partition("\n")[0]
    else:
        what = f"no room for {size_label(found.requested_bytes)} more of {found.memory} memory"
    if found.held_bytes is None:
        return what
    of_limit = "" if found.limit_bytes is None else f" of a limit of {size_label(found.limit_bytes)}"
    return f"{what}, with {size_label(found.held_bytes)} held{of_limit}"
