"""The tokenizer of a local folder: tried on the text's beginning while planning, used whole by ranks."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.config import ConfigError
from bench.labels import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_ids(text: str, tokenizer: str, vocab_size: int) -> NDArray[Any]:
    """The ids of a text, [T] int32; raises ConfigError for a tokenizer that fails or exceeds a vocabulary."""
    try:
        ids = np.array(_encoder(tokenizer)(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # noqa: BLE001  the library below raises Exception itself
        raise ConfigError(
            f"data.tokenizer={tokenizer}: cannot be used ({_first_line(error)}); name a folder with a"
            " tokenizer.json, such as a model's own"
        ) from None
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: gives ids up to {int(ids.max())}, but the model's vocabulary has"
            f" {vocab_size}; take the model's own tokenizer"
        )
    return ids


@cache
def refuse_tokenizer(tokenizer: str, beginning: str, vocab_size: int) -> None:
    """Raises ConfigError for a tokenizer that no rank could use on a text that begins so."""
    token_ids(beginning, tokenizer, vocab_size)


@cache
def _encoder(tokenizer: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shown(lines[0].rstrip(":")) if lines else type(error).__name__
