"""Probe of a user's model for attention across documents. May import what lies below extras."""

from bench.extras.probe.leak_probe import probe

__all__ = ["probe"]
