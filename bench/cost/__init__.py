"""FLOPs, traffic, memory and time as arithmetic. May import facts, layouts and nouns; no torch."""
