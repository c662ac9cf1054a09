"""Tokens that a model is called with, and checks that the shards of several ranks form one sequence."""

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
from bench.common.deferred_errors import DeferredErrors
from bench.config import USER_CODE, ConfigError
from bench.extras.observe.objective import RankObjective
from bench.measure.facts import RankReport
from bench.measure.hooks import Hook
from bench.ranks.log import StepPhase


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """Amount of data in one step of a rank."""

    sequences: int
    """Sequences in a micro-step."""
    tokens: int
    """Tokens of a shard."""
    micro_steps: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.tokens} tokens in {self.micro_steps} calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTokens:
    """One rank's shard in the first micro-step of a step."""

    group: Sequence[int]
    """Ranks that share the sequences of this shard."""
    group_rank: int
    """Index of this rank in `group`."""
    batch: int
    length: int
    micro_steps: int
    digest: str
    """Hash of the token ids."""
    positions: Sequence[int] | None
    """Positions of the first sequence; None if the model was given none and counts from 0."""
    model_shifts_labels: bool
    """Whether the model was given plain labels, which it shifts within the shard."""

    @property
    def size(self) -> StepSize:
        return StepSize(self.batch, self.length, self.micro_steps)


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Everything that one rank of an observed loop sends to rank 0."""

    rank_report: RankReport
    tokens: ShardTokens
    """Tokens of the last untimed step."""
    step_sizes: Sequence[StepSize]
    """Sizes of all untimed steps."""
    unplain_layers: Sequence[str]
    """Descriptions of layers that are not plain causal attention."""
    objective: RankObjective
    """Training objective of the step whose attention was compared."""
    stated_not_finite: tuple[int, str] | None
    """First step in which the loop stated a number that is not finite, and a line that says so."""


def wrong_tokens(shards: Sequence[ShardTokens]) -> str | None:
    """Return what is wrong with the shards of one sequence group, in one line; None if nothing is."""
    if len(shards) == 1:
        return None
    first, ranks = shards[0], f"ranks {', '.join(map(str, shards[0].group))}"
    if len({shard.digest for shard in shards}) == 1:
        return (
            f"{ranks} share a sequence, but all of them were fed the same {first.length:,} tokens; give each"
            " rank its own shard"
        )
    if any(shard.positions is None for shard in shards):
        return (
            f"{ranks} share a sequence, but without position_ids every rank counts its positions from 0; give"
            " each rank the positions of its shard"
        )
    if len({tuple(shard_positions(shard)) for shard in shards}) == 1 and not is_packed([first]):
        return (
            f"{ranks} share a sequence, but all of them were given the same positions; give each rank the"
            " positions of its own shard"
        )
    if any(shard.model_shifts_labels for shard in shards):
        return (
            "labels were shifted after sharding: the model shifts them within a shard, so the last token of"
            " each shard is not trained on; shift the labels of whole sequences, and pass their shards as"
            " shift_labels"
        )
    return None if is_packed(shards) else _wrong_positions(shards, ranks)


def shard_positions(shard: ShardTokens) -> Sequence[int]:
    """Return the positions of a shard's first sequence."""
    return range(shard.length) if shard.positions is None else shard.positions


def seq_len(shard: ShardTokens) -> int:
    """Return the number of tokens of a whole sequence, of which all ranks hold equal parts."""
    return shard.length * len(shard.group)


def is_packed(shards: Sequence[ShardTokens]) -> bool:
    """Return whether positions restart within a sequence, as they do in packed documents."""
    return sum(position == 0 for shard in shards for position in shard_positions(shard)) > 1


def find_layout(shards: Sequence[ShardTokens]) -> str:
    """Return the name of the layout that these shards have; `own` if no built-in layout fits.

    Some shards of a sequence are enough.
    """
    tokens, degree = seq_len(shards[0]), len(shards[0].group)
    legal = (name for name, layout in LAYOUTS.items() if tokens % layout.length_multiple(degree) == 0)
    return next((name for name in legal if all(_has_layout(shard, name) for shard in shards)), USER_CODE)


def _has_layout(shard: ShardTokens, layout: str) -> bool:
    sequence = range(seq_len(shard))
    pieces = LAYOUTS[layout].slices(len(sequence), len(shard.group), shard.group_rank)
    return [*shard_positions(shard)] == [position for piece in pieces for position in sequence[piece]]


def _wrong_positions(shards: Sequence[ShardTokens], ranks: str) -> str | None:
    """Return a message if not every position of the sequence occurs exactly once."""
    positions = sorted(position for shard in shards for position in shard_positions(shard))
    if positions == [*range(len(positions))]:
        return None
    wrong = next(expected for expected, position in enumerate(positions) if expected != position)
    return (
        f"{ranks} hold {len(positions):,} tokens of a sequence, but position {wrong} is missing or occurs"
        " twice; give each position to exactly one rank"
    )


_IDS, _EMBEDDED = "input_ids", "inputs_embeds"
COPIED = (_IDS, "position_ids")
"""Arguments of the model that are copied. They are small; `inputs_embeds` is not, and `context_parallel` does
not shard it in place."""


class ModelInputWatch:
    """Records the arguments of the models' outermost calls in a step, and the phases of the step.

    Attributes:
        tokens: This rank's tokens in the last watched step; None before the model was called.
    """

    def __init__(self, networks: Sequence[nn.Module], group: Sequence[int], phase: StepPhase) -> None:
        self.networks = networks
        self.group = group
        self.phase = phase
        self.tokens: ShardTokens | None = None
        self._arguments: dict[str, Any] = {}
        self._calls = self._depth = 0
        self._has_own_loss = False
        self._backwards: list[None] = []
        self._errors = DeferredErrors()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watch one step. Nothing is copied from the device before the step ends or raises.

        Raises ConfigError after a step that called the model but ran no backward through it.
        """
        self._arguments, self._calls, self._depth, self._has_own_loss = {}, 0, 0, False
        self._backwards = []
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
                self._arguments = {}
        self._errors.raise_first()
        if self._calls > 0 and not self._backwards:
            raise ConfigError(
                "no gradient reached the model's output within the step; put backward into the context, too"
            )

    def _read(self) -> ShardTokens | None:
        ids = self._arguments.get(_IDS, self._arguments.get(_EMBEDDED))
        if ids is None:
            return None
        positions, labels = self._arguments.get("position_ids"), self._arguments.get("labels")
        return ShardTokens(
            group=self.group,
            group_rank=list(self.group).index(dist.get_rank()),
            batch=ids.shape[0],
            length=ids.shape[1],
            micro_steps=self._calls,
            digest=_digest(ids, dist.get_rank()),
            positions=None if positions is None else positions.reshape(-1, ids.shape[1])[0].tolist(),
            model_shifts_labels=labels is not None
            and self._arguments.get("shift_labels") is None
            and not self._has_own_loss,
        )

    def _enter(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count a call; calls without gradients, such as evaluation or a reference model, are ignored."""
        with self._errors:
            if torch.is_grad_enabled():
                if self._depth == 0:
                    self.phase.enter("forward")
                    self._calls += 1
                if self._calls == 1:
                    self._record_arguments(network, args, named)
        self._depth += 1

    def _record_arguments(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record arguments of the first call; a wrapper's take precedence over those of the model inside."""
        arguments = tensor_arguments(network, args, named)
        # torch's `context_parallel` shards its buffers in place, and restores them before the step ends.
        copies = {name: arguments[name].clone() for name in COPIED if name in arguments}
        self._arguments = {**arguments, **copies, **self._arguments}
        # Transformers' loss functions shift labels; one that the user has set may not. `loss_function`, the
        # public name, would warn.
        loss = getattr(network, "_loss_function", None)
        module = str(getattr(loss, "__module__", ""))
        self._has_own_loss |= loss is not None and not module.startswith("transformers.")

    def _leave(self, _network: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            with self._errors:
                self.phase.enter("backward")
                backwards = self._backwards  # the graph may live on, and must not hold this watch
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _: backwards.append(None))


def tensor_arguments(network: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among a call's arguments, by their parameter names in the module's `forward`."""
    names = [*inspect.signature(type(network).forward).parameters][1:]
    arguments = {**dict(zip(names, args, strict=False)), **named}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _digest(ids: Tensor, rank: int) -> str:
    """Return a hash of the tokens, for which equal tokens are equal.

    If all tokens are the same, as in a trial run, the digest names the rank, so that ranks differ.
    """
    values = ids.detach().cpu().float()
    if bool((values == values.flatten()[0]).all()):
        return f"constant on rank {rank}"
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
