"""Run a planned sweep from its first cell to its last record. May import plan and all below."""
