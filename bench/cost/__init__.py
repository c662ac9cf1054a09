"""FLOPs, traffic and memory as arithmetic; no seconds. May import strategies and all below; no torch."""
