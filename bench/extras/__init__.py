"""Predicted times, ranks on other machines, user loops: optional parts. May import run and all below."""
