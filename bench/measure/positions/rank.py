"""The positions pass on a rank: it compares rotary cos and sin with those of the whole sequence.

A module is taken for a rotary embedding if it returns a pair (cos, sin). The expected pair comes from the
same module, which is called once more with the positions of the whole sequence and then restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    pair: tuple[Tensor, Tensor]
    """Cos and sin that the call returned."""


class PositionsPass(RankPass):
    section: PositionsSection | None = None

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.calls: dict[str, ModuleCall] = {}
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

    def _compare(self) -> None:
        """Compare the recorded calls once the inspected step has run and its positions are known."""
        subject = self.measurement.subject
        if self.section is not None or not self.was_inspected or subject.sequence_ranks == 1:
            return
        positions = subject.input_positions()
        if positions is not None:
            with self.measurement.log.run_phase("positions"):
                self.section = compare(self.calls, positions, subject.sequence_ranks)
            self.calls = {}


@torch.no_grad()
def compare(calls: Mapping[str, ModuleCall], positions: Tensor, ranks: int) -> PositionsSection:
    """Return the differences of each call's cos and sin from those of the whole sequence.

    Args:
        calls: Calls by module name and kind of layer.
        positions: Positions of this rank's tokens, one of `ranks` equal shards of a sequence: [S], or
            [rows, S] with rows of time, height and width.
        ranks: Number of ranks that share the sequence.
    """
    shard_tokens, tokens = positions.shape[-1], int(positions.max()) + 1
    if bool((positions[..., 1:] > positions[..., :-1]).all()):  # if not, positions restart in every document
        tokens = max(tokens, shard_tokens * ranks)
    whole_positions, places = torch.arange(tokens), positions
    if positions.dim() > 1:  # the tokens of the shard, and after them the largest positions
        whole_positions = torch.cat([positions, whole_positions.expand(len(positions), -1)], dim=1)
        places = torch.arange(shard_tokens)
    errors: dict[str, Tensor] = {}
    limits: dict[str, float] = {}
    rope_types, reasons = [], []
    for name, call in calls.items():
        if call.pair[0].shape[-2] != shard_tokens or not _has_constant_radius(*call.pair):
            continue
        whole = _whole_pair(call, shard_tokens, whole_positions)
        if isinstance(whole, str):
            reasons.append(f"{name}: {whole}")
            continue
        errors[name], limits[name] = _errors_and_limit(call.pair, whole, places)
        rope_types.append(_rope_type(call.module))
    if not errors:
        reason = next(iter(reasons), NONE_FOUND)
        return PositionsSection(
            compared=0, rope_type=None, module=[None], position=[None], error=[0.0], reason=reason
        )
    differs = {name: ~(error <= limits[name]) for name, error in errors.items()}
    module = next((name for name in differs if bool(differs[name].any())), None)
    position = None
    if module is not None:
        first_row = positions.view(-1, shard_tokens)[0].to(differs[module].device)
        position = int(first_row[differs[module]].min())
    return PositionsSection(
        compared=len(errors),
        rope_type=rope_types[[*errors].index(module) if module is not None else 0],
        module=[module],
        position=[position],
        error=[max(float(error.max()) for error in errors.values())],
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


def _whole_pair(call: ModuleCall, shard_tokens: int, whole_positions: Tensor) -> tuple[Tensor, Tensor] | str:
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


def _errors_and_limit(
    local: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], positions: Tensor
) -> tuple[Tensor, float]:
    """Return each token's largest difference of cos or sin, [S], and the largest that rounding explains."""
    positions = positions.to(whole[0].device)
    by_token = []
    for result, exact in zip(local, whole, strict=True):
        expected = exact[..., positions, :]
        first = result[..., :1, :, :] if result.dim() > 2 else result  # noqa: PLR2004  the first sequence
        difference = (first.double() - expected.double()).abs()
        by_token.append(difference.transpose(-1, -2).flatten(0, -2).amax(0))
    largest = max(float(values.abs().max()) for values in whole)
    return torch.stack(by_token).amax(0), ULPS * torch.finfo(local[0].dtype).eps * largest


def _rope_type(module: nn.Module) -> str:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return str(getattr(module, "rope_type", None) or parameters.get("rope_type") or "unknown")


PASS = PositionsPass
