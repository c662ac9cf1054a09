"""Tokens that a model is called with, and a check that the shards of several ranks form one sequence."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.common.deferred_errors import DeferredErrors
from bench.config import USER_CODE, ConfigError
from bench.extras.observe.objective import RankObjective
from bench.extras.observe.places import ROW_FACTOR, Row, find_places, layout_shards
from bench.measure.facts import RankReport
from bench.measure.hooks import Hook
from bench.ranks.log import StepPhase


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
    positions: Sequence[Row]
    """Positions of every sequence, by default from 0. Several rows, as for images, are combined into one."""
    has_positions: bool
    """Whether the model was given positions."""
    model_shifts_labels: bool
    """Whether the model was given `labels`, which it shifts within the shard, so the last label is lost."""

    @property
    def seq_len(self) -> int:
        """Tokens of a whole sequence. All ranks of its group hold shards of equal length."""
        return self.length * len(self.group)

    @property
    def size(self) -> str:
        """Description of the amount of data in the step."""
        return f"{self.batch} x {self.length} tokens in {self.micro_steps} calls"


@dataclass(frozen=True, slots=True)
class LoopReport:
    """Everything that one rank of an observed loop sends to rank 0."""

    rank_report: RankReport
    tokens: ShardTokens
    """Tokens of the last untimed step."""
    step_sizes: Sequence[str]
    """Sizes of all untimed steps."""
    unplain_layers: Sequence[str]
    """Descriptions of layers that are not plain causal attention, for example with a sliding window."""
    objective: RankObjective
    """Training objective of the step whose attention was compared."""
    stated_not_finite: tuple[int, str] | None
    """First step in which the loop stated a number that is not finite, and a line that says so."""


def sharding_mistake(shards: Sequence[ShardTokens]) -> str | None:
    """Return a message about a mistake in sharding one sequence, such as equal shards; None if there is none.

    `shards` are the shards of one sequence group, in the order of its ranks.
    """
    if len(shards) == 1:
        return None
    first = shards[0]
    has_equal_positions = len({tuple(shard.positions[0]) for shard in shards}) == 1
    mistakes = {
        f"all of them were fed the same {first.length:,} tokens; give each rank its own shard": (
            len({shard.digest for shard in shards}) == 1
        ),
        "without position_ids every rank counts its positions from 0; give each rank the positions of its"
        " shard": not all(shard.has_positions for shard in shards),
        "all of them were given the same positions; give each rank the positions of its own shard": (
            has_equal_positions and not restarts([first])
        ),
        "labels were shifted after sharding: the model shifts them within a shard, so the last token of each"
        " shard is not trained on; shift the labels of whole sequences, and pass their shards as"
        " shift_labels": any(shard.model_shifts_labels for shard in shards),
    }
    wrong = next((message for message, is_made in mistakes.items() if is_made), None)
    if wrong is None and not restarts(shards):
        wrong = _position_mistake([shard.positions for shard in shards])
    ranks = ", ".join(map(str, first.group))
    return None if wrong is None else f"ranks {ranks} share a sequence, but {wrong}"


def restarts(shards: Sequence[ShardTokens]) -> bool:
    """Return whether positions restart within a sequence, as they do in packed documents."""
    return sum(position == 0 for shard in shards for position in shard.positions[0]) > 1


def find_layout(shards: Sequence[ShardTokens]) -> str:
    """Return the name of the first built-in layout that has these positions; `own` if there is none.

    `shards` may lack shards of the sequence.
    """
    layouts = layout_shards(shards[0].seq_len, len(shards[0].group))
    names = (
        name
        for name, parts in layouts
        if all([*shard.positions[0]] == parts[shard.group_rank] for shard in shards)
    )
    return next(names, USER_CODE)


def _position_mistake(shards: Sequence[Sequence[Row]]) -> str | None:
    """Return a message if not every position of the sequence occurs exactly once."""
    if find_places(shards) is not None:
        return None
    rows = [sorted(itertools.chain(*parts)) for parts in zip(*shards, strict=True)]
    positions = next((row for row in rows if row != [*range(len(row))]), None)
    if positions is None:
        return "the sequences of a batch are split in different ways; split all of them alike"
    if positions[-1] >= ROW_FACTOR:
        return "two of its tokens have the same position in all rows"
    wrong = next(place for place, position in enumerate(positions) if place != position)
    return f"position {wrong} is missing or occurs twice; give each position to exactly one rank"


_IDS, _EMBEDDED = "input_ids", "inputs_embeds"
COPIED_ARGUMENTS = (_IDS, "position_ids")
"""Arguments of the model that are copied, as torch's `context_parallel` restores the whole tensors before the
step ends."""


class ModelInputWatch:
    """Records a step's phases, its number of model calls, and the arguments of the first call.

    Attributes:
        entry_points: Modules that the loop may call.
        tokens: This rank's tokens in the last watched step; None before the model was called.
        shard_index: Indices of this rank's tokens, [S], if the model is given whole sequences and takes its
            shard inside, as vision-language models do; else None.
    """

    def __init__(self, entry_points: Sequence[nn.Module], group: Sequence[int], phase: StepPhase) -> None:
        self.entry_points = entry_points
        self.group = group
        self.phase = phase
        self.tokens: ShardTokens | None = None
        self.shard_index: Tensor | None = None
        self._arguments: dict[str, Any] = {}
        self._calls = self._depth = 0
        self._has_own_loss = False
        self._backwards: list[None] = []
        self._errors = DeferredErrors()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watch one step and set `tokens`. Nothing is copied to the host before the step ends or raises.

        Raises ConfigError after a step that called the model but ran no backward through it.
        """
        self._arguments, self._calls, self._depth, self._has_own_loss = {}, 0, 0, False
        self._backwards, self.shard_index = [], None
        with ExitStack() as hooks:
            for module in self.entry_points[0].modules():
                if hasattr(module, "inv_freq"):
                    rotary = module.register_forward_pre_hook(Hook(self._find_shard), with_kwargs=True)
                    hooks.callback(rotary.remove)
            for module in self.entry_points:
                enter = module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
                leave = module.register_forward_hook(Hook(self._leave), always_call=True)
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

    def latest_tokens(self) -> ShardTokens | None:
        """Return the tokens of the last watched step, or those of the first one while it runs, by shape only.

        Values are not read, because a device that hangs would not return them.
        """
        return self.tokens or self._read(reads_values=False)

    def _read(self, *, reads_values: bool = True) -> ShardTokens | None:
        """Return the tokens in the recorded arguments; None if the model was not called with any."""
        ids = self._arguments.get(_IDS, self._arguments.get(_EMBEDDED))
        if ids is None:
            return None
        given = self._arguments.get("position_ids") if reads_values else None
        labels = self._arguments.get("labels")
        positions = torch.arange(ids.shape[1]) if given is None else given
        return ShardTokens(
            group=self.group,
            group_rank=list(self.group).index(dist.get_rank()),
            batch=ids.shape[0],
            length=ids.shape[1],
            micro_steps=self._calls,
            digest=_digest(ids, dist.get_rank()) if reads_values else "",
            positions=combine_rows(positions, ids.shape[0]).tolist(),
            has_positions=given is not None,
            model_shifts_labels=labels is not None
            and self._arguments.get("shift_labels") is None
            and not self._has_own_loss,
        )

    def _enter(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count a call and record the first; ignore calls without gradients, such as evaluation."""
        with self._errors:
            if torch.is_grad_enabled():
                if self._depth == 0:
                    self.phase.enter("forward")
                    self._calls += 1
                if self._calls == 1:
                    self._record_arguments(network, args, named)
        self._depth += 1

    def _record_arguments(self, network: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Add the arguments of a module in the first call. Those of modules around it take precedence."""
        arguments = tensor_arguments(network, args, named)
        copies = {name: arguments[name].clone() for name in COPIED_ARGUMENTS if name in arguments}
        self._arguments = {**arguments, **copies, **self._arguments}
        # Transformers' loss functions shift labels; a loss function of the user may not. Reading the public
        # `loss_function` would warn.
        loss = getattr(network, "_loss_function", None)
        module = str(getattr(loss, "__module__", ""))
        self._has_own_loss |= loss is not None and not module.startswith("transformers.")

    def _find_shard(self, _module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Set `shard_index` and cut the recorded arguments if rotary positions are those of a shard."""
        with self._errors:
            ids, ranks = self._arguments.get(_IDS), len(self.group)
            if ids is None or ranks == 1 or self._calls != 1 or self.shard_index is not None:
                return
            tensors = (x for x in (*args, *named.values()) if isinstance(x, Tensor))
            integers = (x for x in tensors if not x.is_floating_point())
            shard = next((x for x in integers if x.shape[-1:] == (ids.shape[1] // ranks,)), None)
            if shard is None:
                return
            whole = self._arguments.get("position_ids", torch.arange(ids.shape[1], device=ids.device))
            self.shard_index = find_shard(whole, shard, ranks)
            if self.shard_index is not None:
                self._arguments = cut_to_shard(self._arguments, self.shard_index)

    def _leave(self, _network: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Begin the phase `backward` after an outermost call, and note when a gradient reaches its output."""
        self._depth -= 1
        if self._depth == 0:
            with self._errors:
                self.phase.enter("backward")
                backwards = self._backwards  # the graph may live on, and must not hold this watch
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _: backwards.append(None))


def combine_rows(positions: Tensor, sequences: int) -> Tensor:
    """Return one number for each token's position, [sequences, tokens].

    If rows of time, height and width differ, [3 or 4, sequences, tokens], the last three are combined. Image
    tokens share some rows. The combined numbers grow along a sequence.
    """
    positions = positions.long()  # a combined number has 60 bits
    rows = positions.reshape(-1, *positions.shape[-2:])[-3:] if positions.dim() > 1 else positions[None, None]
    combined = rows[0]
    if bool((rows != rows[:1]).any()):
        combined = (rows[0] * ROW_FACTOR + rows[1]) * ROW_FACTOR + rows[-1]
    return combined.expand(sequences, -1)


def split_rows(codes: Tensor) -> Tensor:
    """Return rows of time, height and width, [3, tokens], of numbers that `combine_rows` has combined.

    Positions that are not combined stay as they are, [tokens].
    """
    if int(codes.max()) < ROW_FACTOR:
        return codes
    return torch.stack([codes // ROW_FACTOR**2, codes // ROW_FACTOR % ROW_FACTOR, codes % ROW_FACTOR])


def find_shard(whole: Tensor, shard: Tensor, ranks: int) -> Tensor | None:
    """Return where a built-in layout has the shard, [..., S], in the whole, [..., T]; None if none has it."""
    for _, parts in layout_shards(whole.shape[-1], ranks):
        for part in parts:
            index = torch.tensor(part, device=whole.device)
            if bool((whole[..., index] == shard).all()):
                return index
    return None


def cut_to_shard(arguments: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """Return ids, embeddings and positions of the tokens at `index` of whole sequences.

    Labels are left out, as the model may take its shard of them before or after it shifts them.
    """
    cut = {name: arguments[name][:, index] for name in (_IDS, _EMBEDDED) if name in arguments}
    positions = arguments.get("position_ids")
    return {**cut, "position_ids": index[None] if positions is None else positions[..., index]}


def tensor_arguments(network: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among a call's arguments, by their parameter names in the module's `forward`."""
    names = [*inspect.signature(type(network).forward).parameters][1:]
    arguments = {**dict(zip(names, args, strict=False)), **named}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _digest(ids: Tensor, rank: int) -> str:
    """Return a hash of the token ids, by which ranks with equal shards are found.

    If all ids of the shard are one and the same, as in a trial run, shards are equal without a mistake. The
    result then names the rank, so that it differs on every rank.
    """
    values = ids.detach().cpu().float()
    if bool((values == values.flatten()[0]).all()):
        return f"constant on rank {rank}"
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
