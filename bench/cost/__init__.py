"""FLOPs, bytes and memory by arithmetic; no seconds, no torch. May import training and all below."""
