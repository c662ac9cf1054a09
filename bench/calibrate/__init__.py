"""What this machine can do, measured operation by operation; no training step runs. Starts ranks."""
