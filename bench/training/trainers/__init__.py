"""The one table of trainers: whose training loop runs."""

from __future__ import annotations

from collections.abc import Mapping

from bench.training.trainers.accelerate import AccelerateTrainer
from bench.training.trainers.native import NativeTrainer
from bench.training.trainers.trainer import Trainer
from bench.training.trainers.transformers import HuggingFaceTrainer
from bench.training.trainers.trl import SupervisedTrainer

TRAINERS: Mapping[str, type[Trainer]] = {
    "native": NativeTrainer,
    "accelerate": AccelerateTrainer,
    "transformers": HuggingFaceTrainer,
    "trl": SupervisedTrainer,
}
