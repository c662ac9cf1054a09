"""TRL's SFTTrainer, which adds a fused head, metrics and checks of its own to transformers' Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.training.trainers.transformers import HuggingFaceTrainer

ROWS = 2**20
"""More than any cell trains on: a table has to know its length."""


@dataclass(slots=True)
class SupervisedTrainer(HuggingFaceTrainer):
    def classes(self) -> tuple[Any, Any]:
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer, SFTConfig

    def dataset(self) -> Any:
        """SFTTrainer wants an object of the datasets package: numbers, which become rows when asked for."""
        from datasets import Dataset

        samples = self.samples(0, self.cell.seq_len)

        def rows(numbers: dict[str, list[int]]) -> dict[str, list[Tensor]]:
            found = [samples[number] for number in numbers["number"]]
            return {name: [row[name] for row in found] for name in found[0]}

        numbered = Dataset.from_dict({"number": range(ROWS)})
        numbered.set_transform(rows)
        return numbered

    def extras(self) -> dict[str, Any]:
        """It asks for a tokenizer, which it has no use for, as the rows are tokens: one that only pads."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        empty = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))  # noqa: S106
        padding = PreTrainedTokenizerFast(tokenizer_object=empty, pad_token="<pad>", eos_token="<pad>")  # noqa: S106
        return {"processing_class": padding}

    def arguments(self) -> dict[str, Any]:
        return {
            **HuggingFaceTrainer.arguments(self),
            "max_length": self.cell.seq_len,
            "pad_to_multiple_of": self.cell.sp_degree,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "gradient_checkpointing": self.cell.checkpointing,
        }


TRAINER = SupervisedTrainer
