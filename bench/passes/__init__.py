"""One folder a pass. May import training, cost, strategies and all below."""
