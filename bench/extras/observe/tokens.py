"""The tokens that a model was fed in a step, by rank, and whether ranks that share a sequence hold one."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.attention.layouts import LAYOUTS
from bench.common.kept_errors import KeptErrors
from bench.config import OWN, ConfigError
from bench.extras.observe.objective import RankObjective
from bench.measure.facts import RankReport
from bench.measure.hooks import Hook
from bench.ranks.log import StepPhase

StepSize = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTokens:
    """One rank's part of a step's first micro-step."""

    group: Sequence[int]
    """The ranks that share its sequences."""
    place: int
    """This rank's in the group."""
    batch: int
    length: int
    micro_steps: int
    digest: str
    """Tells different token ids apart."""
    positions: Sequence[int] | None
    """Those of its first sequence; None where the model was given none and counts from 0."""
    model_shifts_labels: bool
    """Whether the model was given plain labels, which it shifts within the shard."""

    @property
    def size(self) -> StepSize:
        """Sequences, tokens of a shard and calls of the model in a step."""
        return self.batch, self.length, self.micro_steps


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What one rank of an observed loop has to say."""

    report: RankReport
    tokens: RankTokens
    """What it was fed in the last step that was looked at."""
    sizes: Sequence[StepSize]
    """Of every step that was looked at."""
    other_layers: Sequence[str]
    """What of the model is not plain causal attention, each in a few words."""
    objective: RankObjective
    """What the step trained on whose attention was compared."""
    stated_not_finite: tuple[int, str] | None
    """The first step in which its loop stated a number that is not finite, and that in one line."""


def misfed(ranks: Sequence[RankTokens]) -> str | None:
    """What is wrong with the tokens of the ranks that share a sequence, in one line, or None."""
    if len(ranks) == 1:
        return None
    first, sharers = ranks[0], f"ranks {', '.join(map(str, ranks[0].group))}"
    if len({each.digest for each in ranks}) == 1:
        return (
            f"{sharers} share a sequence, but all were fed the same {first.length:,} tokens: give"
            " each its shard"
        )
    if any(each.positions is None for each in ranks):
        return (
            f"{sharers} share a sequence, but without position_ids each counts its positions from"
            " 0: give each the positions of its shard"
        )
    if len({tuple(positions_of(each)) for each in ranks}) == 1 and not is_packed([first]):
        return (
            f"{sharers} share a sequence, but all were given the same positions: give each those"
            " of its own shard"
        )
    if any(each.model_shifts_labels for each in ranks):
        return (
            "labels were shifted after sharding: the model shifts them within a shard, so the last token of"
            " each shard is not trained on; shift whole sequences, and hand over shift_labels"
        )
    return None if is_packed(ranks) else _uncovered(ranks, sharers)


def positions_of(rank: RankTokens) -> Sequence[int]:
    """The positions of a rank's first sequence."""
    return range(rank.length) if rank.positions is None else rank.positions


def seq_len(rank: RankTokens) -> int:
    """Tokens of one whole sequence, of which ranks hold equal parts."""
    return rank.length * len(rank.group)


def is_packed(ranks: Sequence[RankTokens]) -> bool:
    """Whether positions start anew within a sequence, as those of several documents do."""
    return sum(position == 0 for each in ranks for position in positions_of(each)) > 1


def layout_of(ranks: Sequence[RankTokens]) -> str:
    """The layout that deals a sequence out like this, as far as these ranks tell; `own` for none of ours."""
    whole, degree = seq_len(ranks[0]), len(ranks[0].group)
    fits = (name for name, layout in LAYOUTS.items() if whole % layout.length_multiple(degree) == 0)
    return next((name for name in fits if all(_is_dealt(each, name) for each in ranks)), OWN)


def _is_dealt(rank: RankTokens, layout: str) -> bool:
    whole = range(seq_len(rank))
    pieces = LAYOUTS[layout].slices(len(whole), len(rank.group), rank.place)
    return [*positions_of(rank)] == [position for piece in pieces for position in whole[piece]]


def _uncovered(ranks: Sequence[RankTokens], sharers: str) -> str | None:
    """Positions that no rank holds, or several do."""
    held = sorted(position for each in ranks for position in positions_of(each))
    if held == [*range(len(held))]:
        return None
    wrong = next(place for place, position in enumerate(held) if place != position)
    return (
        f"{sharers} hold {len(held):,} tokens of a sequence, but position {wrong} is missing or"
        " held twice; give each position to exactly one rank"
    )


_IDS, _EMBEDDED = "input_ids", "inputs_embeds"
COPIED = (_IDS, "position_ids")
"""Small ones; what is embedded no buffer holds."""


class ModelInputWatch:
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
        self._own_loss = False
        self._came_back: list[None] = []
        self._errors = KeptErrors()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at one step, anew; nothing is copied from the device before it ends, well or badly.

        Raises ConfigError after a step that called the model, but in which no gradient came back to it.
        """
        self._first, self._calls, self._depth, self._own_loss = {}, 0, 0, False
        self._came_back = []
        with ExitStack() as hooks:
            for network in self.networks:
                enter = network.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
                leave = network.register_forward_hook(Hook(self._leave), always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            try:
                yield
            finally:
                self.tokens = self._read() or self.tokens
                self._first = {}
        self._errors.raise_first()
        if self._calls > 0 and not self._came_back:
            raise ConfigError(
                "no gradient came back to the model within the step; put backward into the context, too"
            )

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
            digest=_digest(ids, dist.get_rank()),
            positions=None if positions is None else positions.reshape(-1, ids.shape[1])[0].tolist(),
            model_shifts_labels=labels is not None
            and self._first.get("shift_labels") is None
            and not self._own_loss,
        )

    def _enter(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A call; without gradients it is a reference's or an evaluation's, and none of the step's."""
        with self._errors:
            if torch.is_grad_enabled():
                if self._depth == 0:
                    self.phase.enter("forward")
                    self._calls += 1
                if self._calls == 1:
                    self._note(network, args, named)
        self._depth += 1

    def _note(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """What the first call was given, a wrapper's words before those of the model in it."""
        given = tensors_given(network, args, named)
        # torch's `context_parallel` shards its buffers in place, and makes them whole before the step ends.
        copies = {name: given[name].clone() for name in COPIED if name in given}
        self._first = {**given, **copies, **self._first}
        # Transformers' own loss shifts labels; one that a user set need not. Its public name would warn.
        loss = getattr(network, "_loss_function", None)
        module = str(getattr(loss, "__module__", ""))
        self._own_loss |= loss is not None and not module.startswith("transformers.")

    def _leave(self, _network: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            with self._errors:
                self.phase.enter("backward")
                came_back = self._came_back  # the graph, which may live on, holds nothing else of ours
                for each in tree_leaves(output):
                    if isinstance(each, Tensor) and each.requires_grad:
                        each.register_hook(lambda _: came_back.append(None))


def tensors_given(network: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a model is called with, by the names that its forward has for them."""
    names = [*inspect.signature(type(network).forward).parameters][1:]
    given = {**dict(zip(names, args, strict=False)), **named}
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _digest(ids: Tensor, rank: int) -> str:
    """A digest that equal tokens share. Tokens that are all one, as in a trial run, differ by rank."""
    values = ids.detach().cpu().float()
    if bool((values == values.flatten()[0]).all()):
        return f"constant on rank {rank}"
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
