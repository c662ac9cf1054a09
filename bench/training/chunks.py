"""Retrieved chunks of a text in place of the whole text, by BM25. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from bench.training.questions import Encoder, Question

PACKAGE = "bm25s"
"""Package that ranks chunks, of the extra `quality`."""


def with_retrieved_chunks(
    question: Question, encoder: Encoder, *, chunks: int, chunk_tokens: int
) -> Question:
    """Return the question with the `chunks` chunks that match its first query best, in their order.

    Chunks end between words and have about `chunk_tokens` tokens each.
    """
    import bm25s

    pieces = split_text(question.context, encoder, chunk_tokens)
    if len(pieces) <= chunks:
        return question
    retriever = bm25s.BM25()
    retriever.index([_terms(piece, encoder) for piece in pieces], show_progress=False)
    query = _terms(question.asked[0][0], encoder)
    found, _ = retriever.retrieve([query], k=chunks, show_progress=False)
    return replace(question, context="\n".join(pieces[index] for index in sorted(found[0].tolist())))


def split_text(text: str, encoder: Encoder, chunk_tokens: int) -> list[str]:
    """Return the text in chunks of about `chunk_tokens` tokens, cut between words where there are any."""
    width = max(1, chunk_tokens * len(text) // max(1, len(encoder.ids(text))))
    pieces, start = [], 0
    while start < len(text):
        end = start + width
        if end < len(text):
            space = text.rfind(" ", start + 1, end + 1)
            end = end if space < 0 else space
        pieces.append(text[start:end].strip())
        start = end
    return [piece for piece in pieces if piece]


def _terms(text: str, encoder: Encoder) -> Sequence[str]:
    """Return the words of a text in small letters. For a model of bytes, return its characters."""
    if encoder.tokenizer is None:
        return [character for character in text if not character.isspace()]
    return re.findall(r"\w+", text.lower())
