"""Tokens, positions and labels that a model is called with on one rank."""

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

from bench.common.deferred_errors import DeferredErrors
from bench.config import ConfigError
from bench.extras.observe.attention import AttentionArguments
from bench.extras.observe.objective import RankObjective
from bench.extras.observe.observed_model import ObservedModel
from bench.extras.observe.places import Row
from bench.measure.facts import RankReport
from bench.measure.hooks import Hook
from bench.ranks.log import StepPhase

IDS, EMBEDDED = "input_ids", "inputs_embeds"
HIDDEN_DIMENSIONS = 3
UNKNOWN = "unknown on rank"
"""Beginning of the digest of tokens that are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTokens:
    """One rank's shard in the first micro-step of a step."""

    group: Sequence[int]
    """Ranks that share the sequences of this shard."""
    group_rank: int
    batch: int
    length: int
    micro_steps: int
    digest: str
    """Hash of the tokens; different on every rank if they are not known."""
    positions: Sequence[Row]
    """Positions of every sequence; empty if they are not known."""
    positions_reason: str | None

    @property
    def seq_len(self) -> int:
        """Tokens of a whole sequence. All ranks of its group hold shards of equal length."""
        return self.length * len(self.group)

    @property
    def counts_from_zero(self) -> bool:
        """Whether positions are known and none is below 0."""
        return bool(self.positions) and min(map(min, self.positions)) >= 0

    @property
    def size(self) -> str:
        return f"{self.batch} x {self.length} tokens in {self.micro_steps} calls"


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Results that one rank of an observed loop sends to rank 0."""

    rank_report: RankReport
    tokens: ShardTokens
    """Tokens of the last untimed step."""
    untimed_steps: Sequence[tuple[str, str]]
    """Size and hash of the tokens of every untimed step."""
    attention_peers: set[int]
    """Ranks with which attention communicated in the inspected step, this rank included."""
    objective: RankObjective


class ModelInputWatch:
    """Records a step's phases, its number of model calls, and the arguments of the first call.

    A compiled model gets no hooks, which would be compiled into another program. Only the calls of
    `compiled_entry` are then seen.

    Attributes:
        tokens: This rank's tokens in the last watched step; None before the model was called.
    """

    def __init__(
        self, model: ObservedModel, group: Sequence[int], facts: AttentionArguments, phase: StepPhase
    ) -> None:
        self.model, self.group, self.facts, self.phase = model, group, facts, phase
        self.tokens: ShardTokens | None = None
        self._errors = DeferredErrors()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watch one step and set `tokens`. Nothing is copied to the host before the step ends or raises.

        Raises ConfigError after a step that called the model but ran no backward through it.
        """
        self._arguments: dict[str, Any] = {}
        self._rotary_positions: list[Tensor] = []
        self._backwards: list[None] = []
        self._calls = self._depth = 0
        entry = self.model.compiled_entry
        with self._hooks() if entry is None else self._wrap_call(entry):
            try:
                yield
            finally:
                self.tokens = self.read() or self.tokens
                self._arguments = {}
        self._errors.raise_first()
        if self._calls > 0 and not self._backwards:
            raise ConfigError(
                "no gradient reached the model's output within the step; put backward into the context, too"
            )

    def read(self, *, reads_values: bool = True) -> ShardTokens | None:
        """Return the tokens of the running step; None before the model was called.

        Without `reads_values` only shapes are read, because a device that hangs would not return values.
        """
        rank, ranks, queries = dist.get_rank(), len(self.group), self.facts.queries
        ids = self._arguments.get(IDS, self._arguments.get(EMBEDDED))
        if ids is None:
            return None
        batch, length = ids.shape[:2]
        takes_shard = ranks > 1 and queries == length // ranks
        length = length // ranks if takes_shard else length
        is_readable = reads_values and (ranks == 1 or queries == length)
        positions: Tensor | None = None
        reason: str | None = "attention was not seen to be called with the queries of this rank's tokens"
        if is_readable:
            rotary = [x for x in self._rotary_positions if x.shape[-1] == length]
            given = self._arguments.get("position_ids")
            if given is None and ranks == 1:
                given = torch.arange(length, device=ids.device)
            source = rotary[0] if rotary else None if takes_shard or self._rotary_positions else given
            reason = "the model was not seen to rotate by positions of this rank's tokens"
            if source is not None:
                positions, reason = sequence_positions(source, batch)
        return ShardTokens(
            group=self.group,
            group_rank=list(self.group).index(rank),
            batch=batch,
            length=length,
            micro_steps=self._calls,
            digest=_digest(ids, rank) if is_readable and not takes_shard else f"{UNKNOWN} {rank}",
            positions=[] if positions is None else positions.tolist(),
            positions_reason=reason,
        )

    def _enter(self, network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Count a call and record the first; ignore calls without gradients, such as evaluation."""
        with self._errors:
            if torch.is_grad_enabled():
                if self._depth == 0:
                    self.phase.enter("forward")
                    self._calls += 1
                if self._calls == 1:
                    arguments = tensor_arguments(network, args, named)
                    for name in arguments.keys() & {IDS, "position_ids"}:
                        # torch's context_parallel restores the whole tensors before the step ends.
                        arguments[name] = arguments[name].clone()
                    self._arguments = arguments | self._arguments  # outer modules take precedence
        self._depth += 1

    def _see_rotary(self, _module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Copy the positions by which the first call rotates its hidden states."""
        with self._errors:
            tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
            has_states = any(x.is_floating_point() and x.dim() == HIDDEN_DIMENSIONS for x in tensors)
            if self._calls == 1 and has_states and torch.is_grad_enabled():
                self._rotary_positions += [x.clone() for x in tensors if not x.is_floating_point()]

    def _leave(self, _network: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Begin the phase `backward` after an outermost call, and note when a gradient reaches its output."""
        self._depth -= 1
        if self._depth == 0 and output is not None:  # None if the call raised
            with self._errors:
                self.phase.enter("backward")
                backwards = self._backwards  # the graph may live on, and must not hold this watch
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _: backwards.append(None))

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Watch the calls of all entry points, and of the modules that rotate positions."""
        see_rotary, enter, leave = Hook(self._see_rotary), Hook(self._enter), Hook(self._leave)
        with ExitStack() as hooks:
            for module in self.model.entry_points[0].modules():
                if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
                    hooks.enter_context(module.register_forward_pre_hook(see_rotary, with_kwargs=True))
            for module in self.model.entry_points:
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            yield

    @contextmanager
    def _wrap_call(self, entry: nn.Module) -> Iterator[None]:
        """Watch the calls of a module from outside of its compiled program."""
        name = "forward" if entry._compiled_call_impl is None else "_compiled_call_impl"
        original, attributes = getattr(entry, name), vars(entry)
        previous = {name: original} if name in attributes else {}

        def call(*args: Any, **named: Any) -> Any:
            self._enter(self.model.entry_points[-1], args, named)
            output = None
            try:
                output = original(*args, **named)
            finally:
                self._leave(entry, args, output)
            return output

        attributes[name] = call
        try:
            yield
        finally:
            del attributes[name]
            attributes.update(previous)


def sequence_positions(positions: Tensor, sequences: int) -> tuple[Tensor | None, str | None]:
    """Return the positions [sequences, tokens], or None and the reason why they are not known.

    Rows of time, height and width, [3 or 4, sequences, tokens], are equal without images.
    """
    rows = positions.reshape(-1, *positions.shape[-2:]) if positions.dim() > 1 else positions[None, None]
    if bool((rows != rows[:1]).any()):
        return None, "tokens have positions in several rows, as for images"
    return rows[0].expand(sequences, -1), None


def tensor_arguments(network: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among a call's arguments, by their parameter names in the module's `forward`."""
    names = [*inspect.signature(type(network).forward).parameters][1:]
    arguments = {**dict(zip(names, args, strict=False)), **named}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _digest(ids: Tensor, rank: int) -> str:
    """Return a hash of the tokens, by which ranks with equal shards are found."""
    values = ids.detach().cpu().float()
    if bool((values == values[:1, :1]).all()):
        return f"constant on rank {rank}"  # equal shards of a trial run are no mistake
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
