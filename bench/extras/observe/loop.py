"""Somebody's own loop as the passes see it: its model, what it is fed, and one layer's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.attention.watch import AttentionWatch
from bench.config import ConfigError
from bench.extras.observe.attention import captured_attention, module_of, noted_dtype, watched_attention
from bench.extras.observe.objective import RankObjective
from bench.extras.observe.observed_model import ObservedModel
from bench.extras.observe.parity import DTYPE_WORDS, Sharers, compare
from bench.extras.observe.tokens import ModelInputWatch, RankTokens, StepSize, positions_of
from bench.extras.observe.trained_tokens import TrainedTokens
from bench.measure.full_length.section import FullLengthSection
from bench.measure.hooks import Spans, step_spans
from bench.measure.parity.section import ParitySection
from bench.measure.rank_pass import RankPass, StepRequest, Steps
from bench.measure.subject import Subject
from bench.measure.updates.rank import digest, not_finite
from bench.measure.updates.section import RankUpdates
from bench.ranks.log import StepPhase


class Loop(Subject):
    """One rank's part of a loop, whose own code runs the steps."""

    objective: RankObjective
    """What the step trained on whose attention was compared, and what its loop says of that."""
    other_layers: list[str]
    """What of the model, as that step called it, is not plain causal attention."""

    def __init__(
        self, model: ObservedModel, sharers: Sharers, device: torch.device, phase: StepPhase
    ) -> None:
        self.model = model
        self.sharers = sharers
        self.device = device
        self.fed = ModelInputWatch(model.called, sharers.ranks, phase)
        self.phase = phase
        self.attention_name = model.attention_name
        self.attention_code = module_of(model.attention_name)
        self.network = model.called[0]
        self.sequence_ranks = len(sharers.ranks)
        self.dtype = "fp32"
        self.sizes: list[StepSize] = []
        self.trained = TrainedTokens(model.networks[0])
        self.always_updates = True
        """Whether an optimizer was at work in each step that was looked at: else one context is not all of
        what gradients are added up of."""

    def watched(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        return watched_attention(self.attention_name, watch)

    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        return step_spans(self.phase)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Notes what the step is fed, in which dtype attention computes, and where in the step the rank is.

        Raises ConfigError after a step that trained on nothing that was seen.
        """
        noted = noted_dtype(self.attention_name, self._note_dtype)
        with noted, step_spans(self.phase) as spans, self.fed.watched():
            yield
        self.always_updates &= bool(spans)
        self.sizes.append(self.tokens.size)

    def fed_positions(self) -> Tensor:
        return torch.tensor([*positions_of(self.tokens)])

    @property
    def tokens(self) -> RankTokens:
        """What the last step that was looked at was fed; raises ConfigError where that was nothing."""
        tokens = self.fed.tokens
        if tokens is None:
            raise ConfigError(
                "the step did not call the model with input_ids or inputs_embeds, gradients"
                " on; put forward and backward into the context, and hand over the model that is called"
            )
        return tokens

    def note_objective(self) -> None:
        """Keep what the step has trained on, and what its loop says of that."""
        told, calls = self.trained.told, self.trained.micro_steps()
        counts = [each.valid_tokens for each in told if each.valid_tokens is not None]
        known = counts or [each.valid_tokens for each in calls if each.valid_tokens is not None]
        self.objective = RankObjective(
            micro_steps=calls,
            losses=[float(each.loss) for each in told if each.loss is not None],
            valid_tokens=sum(map(float, known)) if known else None,
            is_told=bool(told),
            averages=self.always_updates and self.model.averages_gradients(),
            unknown_divisor=self.model.unknown_divisor(),
        )

    def _note_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = DTYPE_WORDS.get(dtype, str(dtype))


class LoopParity(RankPass):
    """Attention of a real step against float64: a loop of somebody else's cannot be run on inputs of ours."""

    heads: ParitySection
    rows: FullLengthSection

    def run(self) -> Steps:
        loop = self.measurement.subject
        assert isinstance(loop, Loop)
        yield StepRequest.BETWEEN
        ranks = len(loop.sharers.ranks)
        with captured_attention(loop.attention_name, ranks) as captured, loop.seen(), loop.trained.watched():
            yield StepRequest.STEP
        loop.note_objective()
        loop.other_layers = [
            *loop.model.other_layers(loop.tokens.length * ranks),
            *(f"attention is called with {kind}" for kind in captured.kinds),
        ]
        with self.measurement.log.during("parity"):
            self.heads, self.rows = compare(captured, [*positions_of(loop.tokens)], loop.sharers)

    def part(self) -> ParitySection:
        return self.heads


class LoopFullLength(RankPass):
    """Sampled rows of the call of attention that the parity pass has captured and compared."""

    def part(self) -> FullLengthSection:
        parity = self.measurement.passes["parity"]
        assert isinstance(parity, LoopParity)
        return parity.rows


class LoopReplicas(RankPass):
    """The parameters that several ranks hold, by their bits, after the last step that was observed.

    They say whether the ranks still train one model: gradients that nobody averaged make it several.
    """

    def part(self) -> RankUpdates:
        loop = self.measurement.subject
        assert isinstance(loop, Loop)
        held = dict(_trained(loop.model.called[0], loop.model.engine))
        return RankUpdates(
            shard_index=0,  # the names say which shard it is
            digests={name: digest(values) for name, values in held.items()},
            unmoved=[],
            not_finite=[*not_finite(held.items())],
        )


def _trained(model: nn.Module, engine: str) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of every parameter that trains; other ranks' parts of that name are equal.

    Names end with a shard's place where a rank holds no whole parameter; ZeRO-3 leaves only small ones whole.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = parameter.detach()
        local = values.to_local() if isinstance(values, DTensor) else values
        if local.numel() > 0:
            yield f"{name}{_shard(model, engine, values)}", local


def _shard(model: nn.Module, engine: str, values: Tensor) -> str:
    """Which part of a parameter it is, in a way that ranks with the same part agree on."""
    if isinstance(values, DTensor):
        place = values.device_mesh.get_coordinate() or ()
        parts = [at for at, dealt in zip(place, values.placements, strict=False) if not dealt.is_replicate()]
        return f" [shard {', '.join(map(str, parts))}]" if parts else ""
    own_parts = engine == "fsdp1" or any(getattr(each, "tp_size", None) for each in model.modules())
    return f" [shard of rank {dist.get_rank()}]" if own_parts else ""
