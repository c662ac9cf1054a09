"""transformers' Trainer: its own loop runs every full-length step, and asks between two whether to go on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.training.optimizer import make_optimizer, make_schedule
from bench.training.trainers.stack import NEXT_LABELS, SAMPLES, SHIFT_LABELS, StackTrainer, collated
from bench.training.trainers.stack_engines import bare_optimizer, parallelism
from bench.training.trainers.trainer import NextStep, StepOutcome


class AskingLoop:
    """What is added to a Trainer, in front of it: it asks before each step, and puts back the last labels.

    It keeps what the Trainer would log of each step, where it is computed: a loop that logs every step waits
    for the device in every step.
    """

    bench: HuggingFaceTrainer
    next_step: NextStep
    losses: list[Tensor]
    """Of the micro-steps of the step at hand."""
    grad_norm: Tensor | float

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of the next step, or none at the end."""
        trainer: Any = self
        if not self.bench.asked(self.next_step):
            trainer.control.should_training_stop = True
            return [], None
        found: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        return found

    def create_optimizer(self, model: Any = None) -> Any:
        """The native loop's, which decays every parameter; the Trainer's own leaves out norms and biases."""
        trainer: Any = self
        if trainer.optimizer is None:
            whole = trainer.model if model is None else model
            trainer.optimizer = make_optimizer(whole, self.bench.cell.optimizer)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
        """The native loop's, which does not end where this loop does."""
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
    """The Trainer of transformers or of a package that builds on it."""

    def prepare(self) -> None:
        base, settings = self.classes()
        kind: Any = type(f"Asking{base.__name__}", (AskingLoop, base), {})
        with TemporaryDirectory() as folder:  # it makes sure that there is one, and leaves nothing there
            self.loop = kind(
                model=self.model,
                args=settings(output_dir=folder, **self.arguments()),
                train_dataset=self.dataset(),
                data_collator=collated,
                **self.extras(),
            )
        self.loop.bench, self.loop.losses = self, []

    def classes(self) -> tuple[Any, Any]:
        """The one whose loop runs, and that of its settings."""
        from transformers import Trainer as TransformersTrainer
        from transformers import TrainingArguments

        return TransformersTrainer, TrainingArguments

    def dataset(self) -> Any:
        """The samples of all full-length steps."""
        return self.samples(0, self.cell.seq_len)

    def extras(self) -> dict[str, Any]:
        """Arguments of this class alone."""
        return {}

    def arguments(self) -> dict[str, Any]:
        """As its documentation configures it; it keeps nothing, and logs as seldom as Trainer by default."""
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

    def run(self, next_step: NextStep) -> None:
        self.loop.next_step = next_step
        self.loop.train()
        if not self.loop.control.should_training_stop:
            raise RuntimeError(
                f"trainer={self.cell.trainer} ended its loop before the last step was asked for"
            )

    def asked(self, next_step: NextStep) -> bool:
        """Whether there is to be another step; tells of the last one."""
        loop, outcome = self.loop, None
        self.phase.enter(None)
        if loop.state.global_step > 0:
            loss_sum, valid_tokens = self.signal.take()
            # As the Trainer adds them: some stacks' losses are in bf16.
            logged = torch.stack(loop.losses).sum(dtype=torch.float32)
            norm = self.engine.reported_norm(loop.grad_norm)
            outcome = StepOutcome(loss_sum, valid_tokens, norm, self.fed.take(), logged)
        else:
            self.engine.attach(loop.model_wrapped, bare_optimizer(loop.optimizer), loop.lr_scheduler)
        goes_on = next_step(outcome)
        self.fed.take()
        loop.losses = []
        self.phase.enter("load")
        return goes_on

    def step(self, number: int, seq_len: int) -> StepOutcome:
        """A step outside of the loop: the Trainer's micro-steps, and then the engine's update."""
        loss_sum, valid_tokens = self._micro_steps(number, seq_len)
        norm = self.engine.update()
        return StepOutcome(loss_sum, valid_tokens, norm, self.fed.take())

    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        loss_sum, valid_tokens = self._micro_steps(number, seq_len)
        dist.all_reduce(valid_tokens)
        return loss_sum, valid_tokens

    def _micro_steps(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        self.fed.take()
        loop, steps = self.loop, self.cell.grad_accum
        batches = self.dealt_batches(loop.accelerator, loop.model_wrapped, number, seq_len)
        whole, items = self.classes()[0].get_batch_samples(loop, batches, steps, loop.args.device)
        loop.current_gradient_accumulation_steps = steps
        with self.engine.held():
            for micro_step, batch in enumerate(whole):
                self._micro_step(batch, items, last=micro_step == steps - 1)
        return self.signal.take()

    def _micro_step(self, batch: Any, items: Any, *, last: bool) -> None:
        """One call of the Trainer's own `training_step`."""
        loop = self.loop
        loop.accelerator.gradient_state._set_sync_gradients(last)
        waits = not last and self.engine.delays_sync
        with loop.accelerator.no_sync(model=loop.model_wrapped) if waits else nullcontext():
            loop.training_step(loop.model_wrapped, batch, items)


TRAINER = HuggingFaceTrainer
