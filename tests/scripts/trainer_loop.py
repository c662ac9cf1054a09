"""A Trainer of transformers, whose steps are observed by a callback."""

from functools import partial
from tempfile import TemporaryDirectory

from transformers import Trainer, TrainingArguments

import bench


def train(observed, model, rows, **arguments):
    """The loss of every micro-step; observed where `observed` is `bench.observe` with choices."""
    losses = []

    class LossesOfTrainer(Trainer):
        def training_step(self, *args, **named):
            loss = super().training_step(*args, **named)
            losses.append(loss.item())
            return loss

    with TemporaryDirectory() as folder:
        chosen = TrainingArguments(
            folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            **arguments,
        )  # fmt: skip
        trainer = LossesOfTrainer(model, chosen, train_dataset=rows)
        if isinstance(observed, partial):
            trainer.add_callback(bench.ObserveCallback(**observed.keywords))
        trainer.train()
    return losses
