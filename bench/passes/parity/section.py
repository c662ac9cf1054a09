"""Parity without torch."""

MAX_TOKENS = 512
"""Parity is checked at no more: float64 attention takes a square of them."""
