"""What this machine can do, operation by operation; no training step runs. May import cell and all below."""
