"""A Trainer of transformers, whose steps are observed by a callback."""

from tempfile import TemporaryDirectory

from transformers import Trainer, TrainerCallback, TrainingArguments


class ObservedSteps(TrainerCallback):
    """Steps of a Trainer, which has no place for a `with`."""

    def __init__(self, observed):
        self.observed = observed

    def on_step_begin(self, *_, model, **__):
        self.step = self.observed(model)
        self.step.__enter__()

    def on_step_end(self, *_, **__):
        self.step.__exit__(None, None, None)


class LossesOfTrainer(Trainer):
    losses = ()

    def training_step(self, *args, **named):
        loss = super().training_step(*args, **named)
        self.losses = [*self.losses, loss.item()]
        return loss


def train(observed, model, rows, **arguments):
    """The loss of every step."""
    with TemporaryDirectory() as folder:
        chosen = TrainingArguments(
            folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
            **arguments,
        )  # fmt: skip
        callbacks = [ObservedSteps(observed)]
        trainer = LossesOfTrainer(model, chosen, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return trainer.losses
