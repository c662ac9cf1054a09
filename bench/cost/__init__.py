"""FLOPs, bytes and memory by arithmetic; no seconds. May import strategies and all below; no torch."""
