"""What attention returned in checkpointed layers, which compute it once (arXiv:2310.03294, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

Output = tuple[Tensor, Tensor]
"""Attention's output and its LSE."""


class KeptOutputs:
    """What attention returned in each checkpointed layer: found when the layer runs once more, in backward.

    `torch.utils.checkpoint` says which layer that is, and keeps what it needs as long as the layer's graph.
    """

    def __init__(self) -> None:
        self._kept: list[Output] | None = None
        self._again: Iterator[Output] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of one layer, for `context_fn`: what it runs under first, and what when it runs again."""
        kept: list[Output] = []
        return self._keeping(kept), self._finding(kept)

    def once(self, compute: Callable[[], Output]) -> Output:
        """What `compute` returned for the same call of this layer, or returns now."""
        if self._again is not None:
            return next(self._again)
        out, lse = compute()
        if self._kept is not None:
            self._kept.append((out.detach(), lse))  # without the graph that its caller makes it part of
        return out, lse

    @contextmanager
    def _keeping(self, kept: list[Output]) -> Iterator[None]:
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def _finding(self, kept: list[Output]) -> Iterator[None]:
        self._again = iter(kept)
        try:
            yield
        finally:
            self._again = None
