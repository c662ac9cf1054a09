"""Trainer with TRL's SFTTrainer, which adds a fused head, metrics and checks to transformers' Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.training.trainers.transformers import HuggingFaceTrainer

ROWS = 2**20
"""Nominal number of rows of the data set, which must have a length; no cell trains on more."""


@dataclass(slots=True)
class SupervisedTrainer(HuggingFaceTrainer):
    def classes(self) -> tuple[Any, Any]:
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer, SFTConfig

    def dataset(self) -> Any:
        """Return a Dataset of the datasets package, whose transform replaces row numbers by samples."""
        from datasets import Dataset

        samples = self.samples(0, self.cell.padded_len)

        def load_samples(numbers: dict[str, list[int]]) -> dict[str, list[Tensor]]:
            rows = [samples[number] for number in numbers["number"]]
            return {name: [row[name] for row in rows] for name in rows[0]}

        dataset = Dataset.from_dict({"number": range(ROWS)})
        dataset.set_transform(load_samples)
        return dataset

    def extras(self) -> dict[str, Any]:
        """Return a tokenizer that only pads; SFTTrainer requires one, although its rows are tokens."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        empty = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))  # noqa: S106
        padding = PreTrainedTokenizerFast(tokenizer_object=empty, pad_token="<pad>", eos_token="<pad>")  # noqa: S106
        return {"processing_class": padding}

    def arguments(self) -> dict[str, Any]:
        return {
            **HuggingFaceTrainer.arguments(self),
            "max_length": self.cell.padded_len,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            # By default TRL checkpoints all models, and without `offload`. The model has its setting already.
            "gradient_checkpointing": False,
        }


TRAINER = SupervisedTrainer
