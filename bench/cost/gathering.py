"""Which weights ZeRO-3 gathers in a micro-step, call by call, once it knows in which order modules follow.

What a module needs and does not have is gathered when it is entered, and in one more call what the next ones
need. A tensor is let go of when its module is left, unless a module that is near uses it again. "Near" is a
number of weights between: the last layers of a large model, and all of a small one, are gathered once for
forward and backward, the others twice. After `fetch_sub_module` and `release_sub_module` of DeepSpeed 0.19's
`runtime/zero/partitioned_param_coordinator.py`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bench.config import ModelConfig, RunConfig
from bench.cost.engine_memory import MAX_LIVE_PARAMETERS
from bench.cost.memory import CHUNK_ROWS
from bench.cost.tensors import TrainedTensor, embedding, head, last_norm, layer_modules

Module = tuple[TrainedTensor, ...]
Call = tuple[Module, bool]
"""A module that is entered, or left."""
BARE: Module = ()
"""A module without tensors of its own: to enter it gathers for the next ones, too."""


def stays_whole(model: ModelConfig, tensor: TrainedTensor) -> bool:
    """Whether every rank keeps it, by `stage3_param_persistence_threshold` of `training`."""
    return tensor.count <= 10 * model.hidden_size


def gathered_ahead(model: ModelConfig) -> int:
    """Numbers that are enough to gather for the next modules: `stage3_prefetch_bucket_size` of `training`."""
    return int(0.9 * model.hidden_size**2)


def gathered_together(cell: RunConfig) -> tuple[Module, ...]:
    """The tensors of each all-gather of one micro-step."""
    return _gathered(_MicroStep.of(cell))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroStep:
    """What decides which modules follow one another; no strategy does."""

    model: ModelConfig
    chunks: int
    """Of the loss; none where it is computed at once."""
    tiles: int
    """Of an MLP; none where it is not tiled."""
    checkpointing: bool

    @classmethod
    def of(cls, cell: RunConfig) -> _MicroStep:
        rows = cell.batch * cell.shard_len
        return cls(
            model=cell.model,
            chunks=math.ceil(rows / CHUNK_ROWS) if cell.loss == "chunked" else 0,
            tiles=math.ceil(rows / cell.model.hidden_size) if cell.tiled_mlp else 0,
            checkpointing=bool(cell.checkpointing),
        )


@lru_cache(maxsize=64)
def _gathered(step: _MicroStep) -> tuple[Module, ...]:
    """Kept, as all strategies of one degree share it."""
    calls = [*_calls(step)]
    return tuple(_Coordinator(step.model, [module for module, enters in calls if enters]).run(calls))


class _Coordinator:
    """One micro-step of `PartitionedParameterCoordinator`, without its data."""

    def __init__(self, model: ModelConfig, order: Sequence[Module]) -> None:
        self.whole = {tensor for module in order for tensor in module if stays_whole(model, tensor)}
        self.enough = gathered_ahead(model)
        self.queue = deque((tensor, place) for place, module in enumerate(order) for tensor in module)
        self.uses: defaultdict[TrainedTensor, list[int]] = defaultdict(list)
        for tensor, place in self.queue:
            self.uses[tensor].append(place)
        self.passed = [0, *itertools.accumulate(sum(tensor.count for tensor in module) for module in order)]
        self.held: set[TrainedTensor] = set()
        self.held_numbers = 0
        self.looked_ahead: defaultdict[TrainedTensor, int] = defaultdict(lambda: -1)
        """The last use of each that was in reach when something was gathered."""
        self.place = 0
        self.gathered: list[Module] = []

    def run(self, calls: Iterable[Call]) -> list[Module]:
        for module, enters in calls:
            if enters:
                self._gather(module)
                self._gather(self._next_ones(module))
                self.place += 1
            else:
                self._let_go(module)
        return self.gathered

    def _gather(self, tensors: Iterable[TrainedTensor]) -> None:
        missing = tuple(tensor for tensor in tensors if self._is_missing(tensor))
        if missing:
            self.gathered.append(missing)
            self.held.update(missing)
            self.held_numbers += sum(tensor.count for tensor in missing)

    def _is_missing(self, tensor: TrainedTensor) -> bool:
        return tensor not in self.whole and tensor not in self.held

    def _next_ones(self, module: Module) -> list[TrainedTensor]:
        """What to gather ahead, from after this module on until it is enough."""
        for _ in [tensor for tensor in module if self.looked_ahead[tensor] < self.place]:
            tensor, use = self.queue.popleft()
            self.looked_ahead[tensor] = use
        ahead: dict[TrainedTensor, None] = {}
        room = min(MAX_LIVE_PARAMETERS - self.held_numbers, self.enough)
        while self.queue and sum(tensor.count for tensor in ahead) < room:
            tensor, use = self.queue.popleft()
            self.looked_ahead[tensor] = max(self.looked_ahead[tensor], use)
            if self._is_missing(tensor):
                ahead[tensor] = None
        return [*ahead]

    def _let_go(self, module: Module) -> None:
        for tensor in module:
            is_kept = self.looked_ahead[tensor] > self.place or self._is_near(tensor)
            if tensor in self.held and not is_kept:
                self.held.discard(tensor)
                self.held_numbers -= tensor.count

    def _is_near(self, tensor: TrainedTensor) -> bool:
        """Whether it is used again within `stage3_max_reuse_distance` weights, which is as many."""
        uses = self.uses[tensor]
        following = bisect_left(uses, self.place)
        if following == len(uses):
            return False
        return self.passed[uses[following]] - self.passed[self.place] < MAX_LIVE_PARAMETERS


def _calls(step: _MicroStep) -> Iterator[Call]:
    """The modules of one micro-step, forward and backward, as hooks see them."""
    model, chunks = step.model, step.chunks or 1
    layers = [_Layer.of(step, layer) for layer in range(model.num_layers)]
    outer, norm, output = (embedding(model),), (last_norm(model),), (head(model),)
    yield from _through([BARE, BARE, outer, BARE])
    for layer in layers:
        yield from _through([BARE, *layer.forward(step)])
    yield from _through([norm, *[output] * chunks, BARE])
    for _ in range(chunks):
        yield from _again([output]) if step.chunks else _through([output])
    yield from _through([BARE, norm])
    for layer in reversed(layers):
        yield from _through([BARE, BARE])
        yield from layer.backward(step)
    yield from _through([outer])


@dataclass(frozen=True, slots=True)
class _Layer:
    """The modules of one layer. Backward enters the layer itself and its MLP, both bare, before any other."""

    attention: tuple[Module, ...]
    """With the norms before it and after."""
    mlp: tuple[Module, ...]

    @classmethod
    def of(cls, step: _MicroStep, layer: int) -> _Layer:
        norm, *attention, mlp_norm, gate, up, down = layer_modules(step.model, layer)
        return cls((norm, BARE, *attention, mlp_norm), (gate, BARE, up, down))

    def forward(self, step: _MicroStep) -> list[Module]:
        return [*self.attention, BARE, *self.mlp * (step.tiles or 1)]

    def backward(self, step: _MicroStep) -> Iterator[Call]:
        """Tiles of an MLP are checkpointed, too; the last is computed again with its layer."""
        tiles = step.tiles
        if step.checkpointing:
            yield from _into_again(self.forward(step))
            yield from _through(reversed(self.mlp[:-1]))
            tiles -= 1
        elif not tiles:
            yield from _through(reversed(self.mlp))
        for _ in range(tiles):
            yield from _again(self.mlp)
        norm, bare, *attention, mlp_norm = self.attention
        yield from _through([mlp_norm, bare, *reversed(attention), norm])


def _through(modules: Iterable[Module]) -> Iterator[Call]:
    """One after another."""
    for module in modules:
        yield module, True
        yield module, False


def _again(modules: Sequence[Module]) -> Iterator[Call]:
    """Backward of modules that are checkpointed."""
    yield from _into_again(modules)
    yield from _through(reversed(modules[:-1]))


def _into_again(modules: Sequence[Module]) -> Iterator[Call]:
    """Into the last, through all once more: recomputing stops within the last, which is left only once."""
    *before, last = modules
    yield last, True
    yield from _through(before)
    yield last, True
    yield last, False
