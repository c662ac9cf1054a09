"""The positions pass on a rank: it compares rotary cos and sin with those of the whole sequence.

A module is taken for a rotary embedding if it returns a pair (cos, sin). The expected pair comes from the
same module, which is called once more with the positions of the whole sequence and then restored. In cells,
queries and keys of every layer are compared with their rotation by the expected pair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.deferred_errors import DeferredErrors
from bench.measure.hooks import Hook
from bench.measure.positions.section import PositionsSection
from bench.measure.rank_pass import Measurement, RankPass, StepRequests

ULPS = 4
"""Limit of a difference in ulps, because vectorised and scalar cosines may round differently."""
RADIUS_TOLERANCE = 2**-5
"""Largest relative difference of cos^2 + sin^2 between two tokens; bf16 rounds each square by 2^-9."""
ROTATE = "apply_rotary_pos_emb"
"""Name of the function by which every layer of the models of cells rotates queries and keys."""
SAMPLED_TOKENS = slice(None, None, 32)
CosSin = tuple[Tensor, Tensor]
NONE_FOUND = "no module of the model returned cos and sin of this rank's tokens"
SEVERAL_ROWS = "position_ids has several rows that differ, as for images"


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module that returned cos and sin."""

    module: nn.Module
    args: Sequence[Any]
    """Positional arguments; hidden states are cut to one token."""
    keywords: Mapping[str, Any]
    """Keyword arguments; hidden states are cut to one token."""
    pair: CosSin
    """Cos and sin that the call returned."""


class PositionsPass(RankPass):
    section: PositionsSection | None = None

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.calls: dict[str, ModuleCall] = {}
        self.layer_pairs: dict[str, CosSin] = {}
        self.layer = ""
        self.was_inspected = False
        self.errors = DeferredErrors()

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        subject = self.measurement.subject
        network = subject.network if subject.sequence_ranks > 1 else None
        with ExitStack() as hooks:
            for name, module in network.named_modules() if network is not None else ():
                if not [*module.children()] and not [*module.parameters()]:
                    hook = Hook(partial(self._record_call, name))
                    hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if network is not None and subject.trainer is not None:  # a user's model may be compiled again
                self._record_rotations(network, hooks)
            yield
        self.was_inspected = True
        self.errors.raise_first()

    def run(self) -> StepRequests:
        self._compare()
        yield from ()

    def part(self) -> PositionsSection | None:
        self._compare()
        return self.section

    def _record_call(
        self, name: str, module: nn.Module, args: Any, keywords: Mapping[str, Any], pair: Any
    ) -> None:
        """Keep the first call of a module for each kind of layer that its arguments name."""
        with self.errors:
            kinds = [value for value in (*args, *keywords.values()) if isinstance(value, str)]
            key = " ".join([name, *kinds])
            if torch.is_grad_enabled() and key not in self.calls and _is_pair(pair):
                self.calls[key] = ModuleCall(
                    module,
                    args=[_cut_to_one_token(value) for value in args],
                    keywords={keyword: _cut_to_one_token(value) for keyword, value in keywords.items()},
                    pair=(pair[0].detach(), pair[1].detach()),
                )

    def _record_rotations(self, network: nn.Module, hooks: ExitStack) -> None:
        """Record the calls of the function that rotates in layers of the network until `hooks` closes."""
        for name, module in network.named_modules():
            if "layer_idx" in vars(module):
                hook = Hook(partial(self._enter_layer, name))
                hooks.callback(module.register_forward_pre_hook(hook).remove)
        for code in {sys.modules[type(module).__module__] for module in network.modules()}:
            if plain := getattr(code, ROTATE, None):
                hooks.callback(setattr, code, ROTATE, plain)
                setattr(code, ROTATE, partial(self._rotate, plain))

    def _enter_layer(self, name: str, *_: Any) -> None:
        self.layer = name

    def _rotate(self, plain: Callable[..., CosSin], *args: Any, **keywords: Any) -> CosSin:
        """Call the function that rotates q and k, and keep the cos and sin of each layer's first call."""
        rotated = plain(*args, **keywords)
        with self.errors:
            layer = f"{self.layer} in backward" if torch._C._current_graph_task_id() >= 0 else self.layer
            if torch.is_grad_enabled() and layer not in self.layer_pairs:
                self.layer_pairs[layer] = _applied_pair(args[:2], rotated)
        return rotated

    def _compare(self) -> None:
        """Compare the recorded calls once the inspected step has run and its positions are known."""
        subject = self.measurement.subject
        if self.section is not None or not self.was_inspected or subject.sequence_ranks == 1:
            return
        positions = subject.input_positions()
        if positions is not None:
            with self.measurement.log.run_phase("positions"):
                pairs = {name: pair for name, pair in self.layer_pairs.items() if pair[0].isfinite().any()}
                self.section = compare(self.calls, positions, subject.sequence_ranks, pairs)
            self.calls, self.layer_pairs = {}, {}


@torch.no_grad()
def compare(
    calls: Mapping[str, ModuleCall], positions: Tensor, ranks: int, layer_pairs: Mapping[str, CosSin]
) -> PositionsSection:
    """Return the differences of each call's cos and sin from those of the whole sequence.

    Args:
        calls: Calls by module name and kind of layer.
        positions: Positions of this rank's tokens, one of `ranks` equal shards of a sequence: [S], or
            [rows, S] with rows of time, height and width.
        ranks: Number of ranks that share the sequence.
        layer_pairs: Cos and sin by which a layer rotated sampled tokens, by layer and direction.
    """
    shard_tokens, tokens = positions.shape[-1], int(positions.max()) + 1
    if bool((positions[..., 1:] > positions[..., :-1]).all()):  # if not, positions restart in every document
        tokens = max(tokens, shard_tokens * ranks)
    whole_positions, places = torch.arange(tokens), positions
    if positions.dim() > 1:  # the tokens of the shard, and after them the largest positions
        whole_positions = torch.cat([positions, whole_positions.expand(len(positions), -1)], dim=1)
        places = torch.arange(shard_tokens)
    row = positions.view(-1, shard_tokens)[0]
    differences: dict[str, tuple[float, int | None]] = {}
    wholes: dict[str, CosSin] = {}
    reasons = []
    for name, call in calls.items():
        if call.pair[0].shape[-2] != shard_tokens or not _has_constant_radius(*call.pair):
            continue
        whole = _whole_pair(call, shard_tokens, whole_positions)
        if isinstance(whole, str):
            reasons.append(f"{name}: {whole}")
            continue
        wholes[name] = whole
        differences[name] = _difference(call.pair, whole, places, row)
    if not wholes:
        reason = next(iter(reasons), NONE_FOUND)
        return PositionsSection(
            compared=0, rope_type=None, module=[None], position=[None], error=[0.0], reason=reason
        )
    first, *_ = wholes
    for layer, pair in layer_pairs.items():
        differences[layer] = _difference(pair, wholes[first], places[SAMPLED_TOKENS], row[SAMPLED_TOKENS])
    wrong = next((name for name, (_, position) in differences.items() if position is not None), None)
    return PositionsSection(
        compared=len(wholes),
        rotations=len(layer_pairs),
        rope_type=None if wrong in layer_pairs else _rope_type(calls[wrong or first].module),
        module=[wrong],
        position=[differences[wrong][1] if wrong is not None else None],
        error=[max(error for error, _ in differences.values())],
        reason=next(iter(reasons), None),
    )


def _is_pair(returned: Any) -> bool:
    return (
        isinstance(returned, tuple)
        and len(returned) == 2  # noqa: PLR2004  cos and sin
        and all(isinstance(value, Tensor) and value.is_floating_point() for value in returned)
        and returned[0].shape == returned[1].shape
        and returned[0].dim() > 1
    )


def _has_constant_radius(cos: Tensor, sin: Tensor) -> bool:
    """Return whether cos^2 + sin^2 is the same for all tokens and features, and not 0."""
    radius = cos.double().square() + sin.double().square()
    return bool(radius.max() - radius.min() <= RADIUS_TOLERANCE * radius.max()) and bool(radius.any())


def _cut_to_one_token(value: Any) -> Any:
    """Return hidden states with the memory of one token, and other values unchanged.

    A rotary embedding reads only the dtype, device and length of hidden states.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2:  # noqa: PLR2004  [B, S, H]
        return value.detach()[:1, ..., :1, :].clone().expand(1, *value.shape[1:])
    return value


def _whole_pair(call: ModuleCall, shard_tokens: int, whole_positions: Tensor) -> CosSin | str:
    """Return cos and sin of `whole_positions`, [T] or [rows, T], or a message (str) why there are none.

    `shard_tokens` is the number of tokens of this rank's shard.
    """
    for value in () if whole_positions.dim() > 1 else (*call.args, *call.keywords.values()):
        has_rows = _is_positions(value, shard_tokens) and value.dim() > 2  # noqa: PLR2004  [rows, B, S]
        if has_rows and bool((value != value[:1]).any()):
            return SEVERAL_ROWS
    args = [_whole_argument(value, shard_tokens, whole_positions) for value in call.args]
    keywords = {
        name: _whole_argument(value, shard_tokens, whole_positions) for name, value in call.keywords.items()
    }
    try:
        with _restore_on_exit(call.module):
            pair = call.module.forward(*args, **keywords)  # forward: hooks must not see this call
    except Exception as error:  # noqa: BLE001  the user's code may raise anything in this call
        return f"cannot be called with a whole sequence ({type(error).__name__}: {error})"
    if not _is_pair(pair) or pair[0].shape[-2] != whole_positions.shape[-1]:
        return "returned no cos and sin of a whole sequence"
    return pair[0], pair[1]


def _is_positions(value: Any, shard_tokens: int) -> bool:
    """Return whether a value is a tensor with an integer for each token of the shard."""
    return (
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and value.dim() > 0
        and value.shape[-1] == shard_tokens
    )


def _whole_argument(value: Any, shard_tokens: int, whole_positions: Tensor) -> Any:
    """Return the argument that one device would pass for one whole sequence with these positions."""
    tokens = whole_positions.shape[-1]
    if _is_positions(value, shard_tokens):
        lead = (*value.shape[:-2], 1) if value.dim() > 1 else ()
        rows = whole_positions.to(value).view(-1, *(1 for _ in lead[1:]), tokens)
        return (rows if lead[:1] == rows.shape[:1] else rows[0]).expand(*lead, tokens)
    if isinstance(value, Tensor) and value.dim() > 2 and value.shape[-2] == shard_tokens:  # noqa: PLR2004
        return value[..., :1, :].expand(*value.shape[:-2], tokens, value.shape[-1])
    return value


@contextmanager
def _restore_on_exit(module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes and buffers on exit.

    Some modules store the frequencies of the longest sequence that they have been called with.
    """
    attributes, buffers = {**vars(module)}, {**module._buffers}
    copies = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for name, copy in copies.items():
            module.get_buffer(name).copy_(copy)


def _difference(local: CosSin, whole: CosSin, places: Tensor, positions: Tensor) -> tuple[float, int | None]:
    """Return the largest difference from cos and sin at `places`, and the first position beyond rounding."""
    by_token = []
    for result, exact in zip(local, whole, strict=True):
        expected = exact[..., places.to(exact.device), :]
        first = result[..., :1, :, :] if result.dim() > 2 else result  # noqa: PLR2004  the first sequence
        difference = (first.double() - expected.double()).abs().where(~first.isnan(), 0)  # q or k was 0
        by_token.append(difference.transpose(-1, -2).flatten(0, -2).amax(0))
    errors = torch.stack(by_token).amax(0).to(positions.device)
    largest = max(float(values.abs().max()) for values in whole)
    differs = ~(errors <= ULPS * torch.finfo(local[0].dtype).eps * largest)
    return float(errors.max()), int(positions[differs].min()) if bool(differs.any()) else None


@torch.no_grad()
def _applied_pair(before: Sequence[Tensor], after: Sequence[Tensor]) -> CosSin:
    """Return cos and sin by which the heads of q and k, [B, heads, S, D], were rotated, [2, 1, tokens, D]."""
    applied = []
    for plain, rotated in zip(before, after, strict=True):
        x, y = (torch.complex(*z[:1, :, SAMPLED_TOKENS].double().chunk(2, dim=-1)) for z in (plain, rotated))
        applied.append((x.conj() * y).sum(1) / x.abs().square().sum(1))
    angles = torch.stack(applied).repeat(1, 1, 1, 2)
    return angles.real.to(before[0].dtype), angles.imag.to(before[0].dtype)


def _rope_type(module: nn.Module) -> str:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return str(getattr(module, "rope_type", None) or parameters.get("rope_type") or "unknown")


PASS = PositionsPass
