"""Tokens of a text, and a chat as text, by a local tokenizer. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common.labels import value_label
from bench.config import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_ids(text: str, tokenizer: str, vocab_size: int) -> NDArray[Any]:
    """Return the token IDs of a text, an int32 vector.

    Raises ConfigError if the tokenizer fails, or if an ID is not below `vocab_size`.
    """
    try:
        ids = np.array(_load(tokenizer)(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # noqa: BLE001  the tokenizers package raises plain Exception
        raise _unusable_error(tokenizer, error) from None
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: gives ids up to {int(ids.max())}, but the model's vocabulary has"
            f" {vocab_size}; take the model's own tokenizer"
        )
    return ids


def render_chat(messages: list[dict[str, Any]], place: str, tokenizer: str) -> str:
    """Return a chat as text by the tokenizer's chat template.

    Raises ConfigError if the tokenizer has none, and ValueError that names the place if the template fails.
    """
    try:
        loaded = _load(tokenizer)
    except Exception as error:  # noqa: BLE001  the tokenizers package raises plain Exception
        raise _unusable_error(tokenizer, error) from None
    if loaded.chat_template is None:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: has no chat template, which the chats of data.path need; name the"
            " tokenizer of a chat model"
        )
    try:
        return str(loaded.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # noqa: BLE001  a template is code, which raises what it likes
        raise ValueError(f"{place} fails in the tokenizer's chat template: {_first_line(error)}") from None


@cache
def check_tokenizer(tokenizer: str, beginning: str, vocab_size: int) -> None:
    """Raise ConfigError if `token_ids` does so for the beginning of a text."""
    token_ids(beginning, tokenizer, vocab_size)


@cache
def _load(tokenizer: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)


def _unusable_error(tokenizer: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.tokenizer={tokenizer}: cannot be used ({_first_line(error)}); name a folder with a"
        " tokenizer.json, such as a model's own"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return value_label(lines[0].rstrip(":")) if lines else type(error).__name__
