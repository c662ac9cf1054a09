"""The arithmetic of a training step: no torch."""
