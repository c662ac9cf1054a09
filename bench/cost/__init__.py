"""FLOPs, traffic, memory and time as arithmetic. May import strategies and all below; no torch."""
