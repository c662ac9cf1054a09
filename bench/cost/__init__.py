"""FLOPs, bytes and memory by formulas, without times or torch. May import training and all below."""
