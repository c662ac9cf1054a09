"""A watch on what a model is fed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from bench.observation.tokens import RankTokens
from bench.step_phase import StepPhase

_IDS, _EMBEDDED = "input_ids", "inputs_embeds"


class Feeding:
    """Sees every outermost call of the models in a step; tells the phase where forward begins and ends.

    `tokens` is what this rank was fed in the last step looked at; None before the model was called.
    """

    def __init__(self, networks: Sequence[nn.Module], group: Sequence[int], phase: StepPhase) -> None:
        self.networks = networks
        self.group = group
        self.phase = phase
        self.tokens: RankTokens | None = None
        self._first: dict[str, Any] = {}
        self._calls = self._depth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at one step, anew; nothing is copied from the device before it ends, well or badly."""
        self._first, self._calls, self._depth = {}, 0, 0
        with ExitStack() as hooks:
            for network in self.networks:
                enter = network.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = network.register_forward_hook(self._leave, always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            try:
                yield
            finally:
                self.tokens = self._read() or self.tokens
                self._first = {}

    def _read(self) -> RankTokens | None:
        ids = self._first.get(_IDS, self._first.get(_EMBEDDED))
        if ids is None:
            return None
        positions, labels = self._first.get("position_ids"), self._first.get("labels")
        return RankTokens(
            group=self.group,
            place=list(self.group).index(dist.get_rank()),
            batch=ids.shape[0],
            length=ids.shape[1],
            micro_steps=self._calls,
            digest=hashlib.sha256(ids.detach().float().cpu().numpy().tobytes()).hexdigest()[:16],
            positions=None if positions is None else positions.reshape(-1, ids.shape[1])[0].tolist(),
            model_shifts_labels=labels is not None and self._first.get("shift_labels") is None,
        )

    def _enter(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._depth == 0:
            self.phase.enter("forward")
            if self._calls == 0:
                given = {**({_IDS: args[0]} if args else {}), **named}
                self._first = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            self._calls += 1
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.phase.enter("backward")
