"""Questions as they are typed."""

from analysis.advise import Advice
from bench.request.questions import questions

QUESTION = ("model=qwen3_8b", "hardware=h100_80gb", "cluster.world_size=8", "seq_len=128k")


def asked(*words, records=()):
    """The advice to the one question of these words."""
    (question,) = questions(words)
    return Advice(question, records)
