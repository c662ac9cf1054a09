"""Trainer with the loop of transformers' Trainer, which the passes continue or stop between steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.training.optimizer import make_optimizer, make_schedule
from bench.training.trainers.stack import NEXT_LABELS, SAMPLES, SHIFT_LABELS, StackTrainer, collate
from bench.training.trainers.stack_engines import bare_optimizer, parallelism
from bench.training.trainers.trainer import StepOutcome, WantsStep


class StepwiseMixin:
    """Mixin for a Trainer class of transformers that asks `wants_step` before every step whether to go on.

    It also gives the last token of a sequence its label, makes the native loop's optimizer and schedule, and
    keeps the losses and the norm; a Trainer that logs them in every step would wait for the device each time.
    """

    bench: HuggingFaceTrainer
    """Trainer of the benchmark that runs this Trainer."""
    wants_step: WantsStep
    losses: list[Tensor]
    """Losses of the current step's micro-steps."""
    grad_norm: Tensor | float
    """Result of clipping in the current step."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of the next step, or none after the last step, which also stops the loop."""
        trainer: Any = self
        if not self.bench.finish_step(self.wants_step):
            trainer.control.should_training_stop = True
            return [], None
        batches: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        return batches

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the native loop's optimizer, which decays all parameters; Trainer's skips norms and biases."""
        trainer: Any = self
        if trainer.optimizer is None:
            optimized = trainer.model if model is None else model
            trainer.optimizer = make_optimizer(optimized, self.bench.cell.optimizer)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
        """Make the native loop's schedule, whose length does not depend on the length of this loop."""
        trainer: Any = self
        if trainer.lr_scheduler is None:
            trainer.lr_scheduler = make_schedule(bare_optimizer(trainer.optimizer), self.bench.cell.optimizer)
        return trainer.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        if NEXT_LABELS in inputs:
            inputs[SHIFT_LABELS] = inputs.pop(NEXT_LABELS).contiguous()
        return super().compute_loss(model, inputs, *args, **named)  # type: ignore[misc]

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **named)  # type: ignore[misc]
        self.losses.append(loss)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **named: Any) -> None:
        self.grad_norm = grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **named)  # type: ignore[misc]


@dataclass(slots=True)
class HuggingFaceTrainer(StackTrainer):
    logs_mean_of_ranks: ClassVar[bool] = True

    loop: Any = None
    """Instance of the class that `classes` returns, with StepwiseMixin."""

    def prepare(self) -> None:
        base, settings = self.classes()
        stepwise: Any = type(f"Stepwise{base.__name__}", (StepwiseMixin, base), {})
        with TemporaryDirectory() as folder:  # the Trainer requires a folder but writes nothing
            self.loop = stepwise(
                model=self.model,
                args=settings(output_dir=folder, **self.arguments()),
                train_dataset=self.dataset(),
                data_collator=collate,
                **self.extras(),
            )
        self.loop.bench, self.loop.losses = self, []

    def classes(self) -> tuple[Any, Any]:
        """Return the class of the training loop and the class of its arguments."""
        from transformers import Trainer as TransformersTrainer
        from transformers import TrainingArguments

        return TransformersTrainer, TrainingArguments

    def dataset(self) -> Any:
        """Return the samples of all full-length steps."""
        return self.samples(0, self.cell.padded_len)

    def extras(self) -> dict[str, Any]:
        """Return arguments of the Trainer class in addition to those that `prepare` passes."""
        return {}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that Trainer's documentation recommends, without saving and with few logs."""
        cell = self.cell
        return {
            "per_device_train_batch_size": cell.batch,
            "gradient_accumulation_steps": cell.grad_accum,
            "max_steps": SAMPLES,
            "learning_rate": cell.optimizer.learning_rate,
            "max_grad_norm": cell.optimizer.max_grad_norm,
            "bf16": cell.dtype == "bf16",
            "use_cpu": cell.cluster.device == "cpu" and cell.dtype == "bf16",
            "logging_steps": 500,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "seed": cell.seed,
            "parallelism_config": parallelism(cell),
            **self.engine.arguments(cell),
        }

    def run_loop(self, wants_step: WantsStep) -> None:
        self.loop.wants_step = wants_step
        self.loop.train()
        if not self.loop.control.should_training_stop:
            raise RuntimeError(f"trainer={self.cell.trainer} ended its loop before the last requested step")

    def finish_step(self, wants_step: WantsStep) -> bool:
        """Pass the outcome of the step that ended to `wants_step`, and return whether to run another step.

        Before the first step the outcome is None, and `engine` is attached to what the Trainer built.
        """
        loop, outcome = self.loop, None
        self.phase.enter(None)
        if loop.state.global_step > 0:
            loss_sum, valid_tokens = self.loss_recorder.take()
            # Trainer also adds in float32; some stacks' losses are in bf16.
            logged = torch.stack(loop.losses).sum(dtype=torch.float32)
            norm = self.engine.reported_norm(loop.grad_norm)
            outcome = StepOutcome(loss_sum, valid_tokens, norm, self.input_digest.take(), logged)
        else:
            self.engine.attach(loop.model_wrapped, bare_optimizer(loop.optimizer), loop.lr_scheduler)
        continues = wants_step(outcome)
        self.input_digest.take()
        loop.losses = []
        self.phase.enter("load")
        return continues

    def step(self, number: int, seq_len: int) -> StepOutcome:
        """Run a step outside of the loop, with the Trainer's micro-steps and the engine's update."""
        loss_sum, valid_tokens = self._micro_steps(number, seq_len)
        norm = self.engine.update()
        return StepOutcome(loss_sum, valid_tokens, norm, self.input_digest.take())

    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        loss_sum, valid_tokens = self._micro_steps(number, seq_len)
        dist.all_reduce(valid_tokens)
        return loss_sum, valid_tokens

    def _micro_steps(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        self.input_digest.take()
        loop, steps = self.loop, self.cell.grad_accum
        loaded = self.rank_batches(loop.accelerator, loop.model_wrapped, number, seq_len)
        batches, items = self.classes()[0].get_batch_samples(loop, loaded, steps, loop.args.device)
        loop.current_gradient_accumulation_steps = steps
        with self.engine.without_update():
            for micro_step, batch in enumerate(batches):
                self._micro_step(batch, items, last=micro_step == steps - 1)
        return self.loss_recorder.take()

    def _micro_step(self, batch: Any, items: Any, *, last: bool) -> None:
        """Run the Trainer's `training_step`; gradients need not be reduced before the `last` micro-step."""
        loop = self.loop
        loop.accelerator.gradient_state._set_sync_gradients(last)
        delays_sync = not last and self.engine.delays_sync
        with loop.accelerator.no_sync(model=loop.model_wrapped) if delays_sync else nullcontext():
            loop.training_step(loop.model_wrapped, batch, items)


TRAINER = HuggingFaceTrainer
