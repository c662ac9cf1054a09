"""A user's own training loop as the subject that passes measure, and the passes that are replaced for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.watch import AttentionWatch, CapturedCall
from bench.config import ConfigError
from bench.extras.observe.attention import AttentionArguments, watch_attention
from bench.extras.observe.attention_check import SequenceGroup, compare_attention
from bench.extras.observe.gradient_factor import GradientFactor
from bench.extras.observe.objective import RankObjective
from bench.extras.observe.observed_model import ObservedModel
from bench.extras.observe.tokens import ModelInputWatch, ShardTokens
from bench.extras.observe.trained_tokens import TrainedTokens
from bench.measure.full_length.section import FullLengthSection
from bench.measure.hooks import Spans, optimizer_step_spans
from bench.measure.rank_pass import RankPass, StepRequest, StepRequests
from bench.measure.subject import Subject
from bench.measure.updates.rank import digest, names_not_finite
from bench.measure.updates.section import RankUpdates
from bench.ranks.log import StepPhase
from bench.request.layer_types import layers_not_plain
from bench.training.text_model import text_config

COMPILED = "the model is compiled, and hooks would be compiled into another program"


class ObservedLoop(Subject):
    """One rank's part of a user's training loop, whose own code runs the steps."""

    def __init__(
        self, model: ObservedModel, sequence_group: SequenceGroup, device: torch.device, phase: StepPhase
    ) -> None:
        self.model, self.is_compiled = model, model.compiled_entry is not None
        self.sequence_group = sequence_group
        self.device = device
        self.phase = phase
        self.attention_name = str(model.networks[0].config._attn_implementation)
        function = ALL_ATTENTION_FUNCTIONS.get(self.attention_name)
        self.attention_modules = function.__module__ if function else "transformers.models"  # for `eager`
        self.network = model.entry_points[0]
        self.sequence_ranks = len(sequence_group.ranks)
        parameter = next(iter(model.networks[0].parameters()))
        self.attention_facts = AttentionArguments(parameter.dtype, self.sequence_ranks)
        self.input_watch = ModelInputWatch(model, sequence_group.ranks, self.attention_facts, phase)
        self.untimed_steps: list[tuple[str, str]] = []
        self.objective = RankObjective(reason=COMPILED)  # replaced by `record_objective`
        self.trained_tokens = TrainedTokens(model.networks[0])
        self.gradient_factor = GradientFactor(model.networks[0])
        self.always_updates = True  # else gradients of several steps add up, and their scale is not known

    def watch_attention(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        return nullcontext() if self.is_compiled else watch_attention(self.attention_name, watch)

    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        return optimizer_step_spans(self.phase)

    @contextmanager
    def around_untimed_step(self) -> Iterator[None]:
        """Watch an untimed step; raise ConfigError after it if forward and backward were not in it."""
        facts = self.attention_facts
        record = nullcontext() if self.is_compiled else facts.record_step(self.attention_name)
        with optimizer_step_spans(self.phase) as spans, self.input_watch.watch_step(), record:
            yield
        self.always_updates &= bool(spans)
        self.untimed_steps.append((self.tokens.size, self.tokens.digest))

    def input_positions(self) -> Tensor | None:
        return torch.tensor([*self.tokens.positions[0]]) if self.tokens.counts_from_zero else None

    @property
    def tokens(self) -> ShardTokens:
        """Tokens of the last untimed step on this rank. Raises ConfigError if the model was not called."""
        if self.input_watch.tokens is None:
            raise ConfigError(
                "the step did not call the model with input_ids or inputs_embeds while gradients were"
                " enabled; put forward and backward into the context, and pass the model that the loop calls"
            )
        return self.input_watch.tokens

    def record_objective(self) -> None:
        """Set `objective` from the step that was watched last. Every rank must call this method."""
        measured = self.gradient_factor.measure(self.sequence_ranks, self.device)
        factor = self.model.gradient_factor() or measured
        stated, calls = self.trained_tokens.stated, self.trained_tokens.micro_steps()
        reason, positions = self.trained_tokens.reason, self.tokens.positions
        if calls and positions and calls[0].positions.tolist() != [[*row] for row in positions]:
            reason = "the model rotates by other positions than it is given, so the next tokens are not known"
        if self.always_updates and not self.gradient_factor.is_multiple:
            reason = "the optimizer's gradient is no multiple of the ranks' sum, as if each clipped its own"
        if any(not has_value for has_value, _ in stated) and any(call.valid_tokens is None for call in calls):
            reason = (
                "the model was given no labels and the loop stated no value, so its loss is computed"
                " elsewhere, as with label smoothing or compute_loss_func"
            )
        stated_counts = [count for _, count in stated if count is not None]
        counts = stated_counts or [call.valid_tokens for call in calls if call.valid_tokens is not None]
        is_counted = len(counts) == len(calls) >= max(1, len(stated))  # each call once
        self.objective = RankObjective(
            micro_steps=calls,
            valid_tokens=sum(map(float, counts)) if is_counted else None,
            is_stated=bool(stated),
            gradient_factor=factor if self.always_updates else None,
            reason=reason,
        )


class LoopAttention(RankPass):
    """Comparison of a real step's attention and objective with one device."""

    section: FullLengthSection

    def run(self) -> StepRequests:
        loop = self.measurement.subject
        assert isinstance(loop, ObservedLoop)
        yield StepRequest.BEFORE_NEXT_STEP
        watch = AttentionWatch()
        watch.captured = CapturedCall()
        with (
            loop.around_untimed_step(),
            loop.watch_attention(watch),
            loop.trained_tokens.watch_step(),
            loop.gradient_factor.watch_step(),
        ):
            yield StepRequest.STEP
        watch.errors.raise_first()
        self.measurement.raise_if_rank_failed()
        loop.record_objective()
        facts = loop.attention_facts
        config = text_config(loop.model.networks[0].config)
        facts.features |= dict.fromkeys(layers_not_plain(config, loop.tokens.seq_len))
        with self.measurement.log.run_phase("full_length"):
            self.section = compare_attention(watch.captured, facts, loop.tokens, loop.sequence_group)

    def part(self) -> FullLengthSection:
        return self.section


class LoopReplicas(RankPass):
    """Digests of the parameters after the last observed step, to compare copies of them on several ranks."""

    def part(self) -> RankUpdates:
        loop = self.measurement.subject
        assert isinstance(loop, ObservedLoop)
        shards = dict(_trained_shards(loop.model.entry_points[0]))
        return RankUpdates(
            shard_index=0,  # the names contain the shard
            digests={name: digest(values) for name, values in shards.items()},
            unmoved=[],
            not_finite=[*names_not_finite(shards.items())],
        )


def _trained_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and the local values of every trained parameter.

    Ranks that yield equal names hold the same values: the name of a shard ends with its index. Parameters
    that ZeRO-3 has partitioned are empty here and are left out.
    """
    is_sharded = any(
        type(module).__name__ == "FullyShardedDataParallel" or getattr(module, "tp_size", None)
        for module in model.modules()
    )
    for name, parameter in model.named_parameters():
        values, shard = parameter.detach(), f"of rank {dist.get_rank()}" if is_sharded else ""
        if isinstance(values, DTensor):
            indices = zip(values.device_mesh.get_coordinate() or (), values.placements, strict=False)
            shard = ", ".join(str(index) for index, placement in indices if not placement.is_replicate())
            values = values.to_local()
        if parameter.requires_grad and values.numel() > 0:
            yield f"{name} [shard {shard}]" if shard else name, values
