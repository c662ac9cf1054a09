"""Rotary cos and sin of one rank, beside those of the whole sequence on one device.

A rotary embedding is known by what it returns: a pair (cos, sin). The expected pair comes from the same
module, called once more with the positions of the whole sequence, and restored after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.kept_errors import KeptErrors
from bench.measure.hooks import Hook
from bench.measure.positions.section import PositionsSection
from bench.measure.rank_pass import RankPass, Steps

ULPS = 4
"""Vectorised and scalar cosines may round differently."""
ONE_CIRCLE = 2**-5
"""How far apart cos^2 + sin^2 of two tokens may be, relative: bf16 rounds each by 2^-9."""
NONE_FOUND = "no module of the model returned cos and sin of this rank's tokens"
SEVERAL_ROWS = "positions are in several rows that differ, as those of images"


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """What a module was called with and returned; tensors of one value a feature are cut to one token."""

    module: nn.Module
    args: Sequence[Any]
    named: Mapping[str, Any]
    pair: tuple[Tensor, Tensor]


class PositionsPass(RankPass):
    found: PositionsSection | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: dict[str, ModuleCall] = {}
        self.was_inspected = False
        self.errors = KeptErrors()

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        subject = self.measurement.subject
        network = subject.network if subject.sequence_ranks > 1 else None
        with ExitStack() as hooks:
            for name, module in network.named_modules() if network is not None else ():
                if not [*module.children()] and not [*module.parameters()]:
                    hook = Hook(partial(self._note, name))
                    hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield
        self.was_inspected = True
        self.errors.raise_first()

    def run(self) -> Steps:
        self._compare()
        yield from ()

    def part(self) -> PositionsSection | None:
        self._compare()
        return self.found

    def _note(self, name: str, module: nn.Module, args: Any, named: Mapping[str, Any], pair: Any) -> None:
        """Keep the first call of a module for each kind of layer named in its arguments."""
        with self.errors:
            kinds = [value for value in (*args, *named.values()) if isinstance(value, str)]
            key = " ".join([name, *kinds])
            if torch.is_grad_enabled() and key not in self.calls and _is_pair(pair):
                cut = [_cut(value) for value in args], {key: _cut(value) for key, value in named.items()}
                self.calls[key] = ModuleCall(module, *cut, (pair[0].detach(), pair[1].detach()))

    def _compare(self) -> None:
        subject = self.measurement.subject
        if self.found is not None or not self.was_inspected or subject.sequence_ranks == 1:
            return
        positions = subject.fed_positions()
        if positions is not None:
            with self.measurement.log.during("positions"):
                self.found = compare(self.calls, positions, subject.sequence_ranks)
            self.calls = {}


@torch.no_grad()
def compare(calls: Mapping[str, ModuleCall], positions: Tensor, ranks: int) -> PositionsSection:
    """`positions` are those of this rank's tokens, one of `ranks` equal shards of a sequence."""
    tokens = int(positions.max()) + 1
    if bool((positions.diff() > 0).all()):  # else documents restart, each of a length of its own
        tokens = max(tokens, len(positions) * ranks)
    errors: dict[str, Tensor] = {}
    limits: dict[str, float] = {}
    rope_types, reasons = [], []
    for name, call in calls.items():
        if call.pair[0].shape[-2] != len(positions) or not _is_one_circle(*call.pair):
            continue
        whole = _whole_pair(call, len(positions), tokens)
        if isinstance(whole, str):
            reasons.append(f"{name}: {whole}")
            continue
        errors[name], limits[name] = _errors(call.pair, whole, positions)
        rope_types.append(_rope_type(call.module))
    if not errors:
        reason = next(iter(reasons), NONE_FOUND)
        return PositionsSection(
            compared=0, rope_type=None, module=[None], position=[None], error=[0.0], reason=reason
        )
    off = {name: ~(error <= limits[name]) for name, error in errors.items()}
    module = next((name for name in off if bool(off[name].any())), None)
    return PositionsSection(
        compared=len(errors),
        rope_type=rope_types[[*errors].index(module) if module is not None else 0],
        module=[module],
        position=[None if module is None else int(positions.to(off[module].device)[off[module]].min())],
        error=[max(float(error.max()) for error in errors.values())],
        reason=next(iter(reasons), None),
    )


def _is_pair(returned: Any) -> bool:
    return (
        isinstance(returned, tuple)
        and len(returned) == 2  # noqa: PLR2004  cos and sin
        and all(isinstance(each, Tensor) and each.is_floating_point() for each in returned)
        and returned[0].shape == returned[1].shape
        and returned[0].dim() > 1
    )


def _is_one_circle(cos: Tensor, sin: Tensor) -> bool:
    radius = cos.double().square() + sin.double().square()
    return bool(radius.max() - radius.min() <= ONE_CIRCLE * radius.max()) and bool(radius.any())


def _cut(value: Any) -> Any:
    """Of hidden states one token: a rotary embedding asks for no more than dtype, device and length."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2:  # noqa: PLR2004  [B, S, H]
        return value.detach()[:1, ..., :1, :].clone().expand(1, *value.shape[1:])
    return value


def _whole_pair(call: ModuleCall, shard: int, tokens: int) -> tuple[Tensor, Tensor] | str:
    """Cos and sin of a sequence of so many tokens, or why the module cannot be asked for them."""
    given = [*call.args, *call.named.values()]
    rows = [each for each in given if _is_positions(each, shard) and each.dim() > 2]  # noqa: PLR2004  [rows, B, S]
    if any(bool((each != each[:1]).any()) for each in rows):
        return SEVERAL_ROWS
    args = [_whole(each, shard, tokens) for each in call.args]
    named = {name: _whole(each, shard, tokens) for name, each in call.named.items()}
    try:
        with _as_it_was(call.module):
            pair = call.module.forward(*args, **named)  # what is hooked to a call is not for this one
    except Exception as error:  # noqa: BLE001  somebody else's code, called in a way of ours
        return f"cannot be called with a whole sequence ({type(error).__name__}: {error})"
    if not _is_pair(pair) or pair[0].shape[-2] != tokens:
        return "returned no cos and sin of a whole sequence"
    return pair[0], pair[1]


def _is_positions(value: Any, shard: int) -> bool:
    return (
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and value.dim() > 0
        and value.shape[-1] == shard
    )


def _whole(value: Any, shard: int, tokens: int) -> Any:
    """The argument as one device would give it for one whole sequence."""
    if _is_positions(value, shard):
        lead = (*value.shape[:-2], 1) if value.dim() > 1 else ()
        return torch.arange(tokens, device=value.device, dtype=value.dtype).expand(*lead, tokens)
    if isinstance(value, Tensor) and value.dim() > 2 and value.shape[-2] == shard:  # noqa: PLR2004
        return value[..., :1, :].expand(*value.shape[:-2], tokens, value.shape[-1])
    return value


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo what a call changes: some keep the frequencies of the longest sequence so far."""
    values, buffers = {**vars(module)}, {**module._buffers}
    numbers = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(values)
        module._buffers.clear()
        module._buffers.update(buffers)
        for name, saved in numbers.items():
            module.get_buffer(name).copy_(saved)


def _errors(
    own: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], positions: Tensor
) -> tuple[Tensor, float]:
    """By token the largest difference, and how large rounding may make it."""
    places = positions.to(whole[0].device)
    by_token = []
    for found, exact in zip(own, whole, strict=True):
        expected = exact[..., places, :]
        one = found[..., :1, :, :] if found.dim() > 2 else found  # noqa: PLR2004  the first sequence
        apart = (one.double() - expected.double()).abs()
        by_token.append(apart.transpose(-1, -2).flatten(0, -2).amax(0))
    radius = max(float(each.abs().max()) for each in whole)
    return torch.stack(by_token).amax(0), ULPS * torch.finfo(own[0].dtype).eps * radius


def _rope_type(module: nn.Module) -> str:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return str(getattr(module, "rope_type", None) or parameters.get("rope_type") or "unknown")


PASS = PositionsPass
